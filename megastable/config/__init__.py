"""The schema of a run file, and loading it with every fault listed at once."""

from megastable.config.amount import Amount
from megastable.config.batch_rampup import BatchRampupConfig
from megastable.config.data import (
    BpeTokenizerConfig,
    BytesTokenizerConfig,
    DataConfig,
    HfSourceConfig,
    SourceConfig,
    StdlibSourceConfig,
    TextSourceConfig,
    TokenizerConfig,
    TransformersTokenizerConfig,
)
from megastable.config.deepspeed_keys import (
    AdamParams,
    Bf16Config,
    DataTypesConfig,
    Fp16Config,
    OptimizerConfig,
    ZeroConfig,
)
from megastable.config.faults import ConfigError, Fault, UnreadableRunFileError
from megastable.config.lr_schedule import LrScheduleConfig
from megastable.config.model import ModelConfig
from megastable.config.run_config import MegastableConfig, RunConfig
from megastable.config.run_file import load_run_file, run_from_dict
from megastable.config.schema import json_schema
from megastable.config.sections import (
    CheckpointConfig,
    InitConfig,
    LoggingConfig,
    MonitorsConfig,
    PipelineConfig,
    TensorParallelConfig,
    TrainingConfig,
)

__all__ = [
    "AdamParams",
    "Amount",
    "BatchRampupConfig",
    "Bf16Config",
    "BpeTokenizerConfig",
    "BytesTokenizerConfig",
    "CheckpointConfig",
    "ConfigError",
    "DataConfig",
    "DataTypesConfig",
    "Fault",
    "Fp16Config",
    "HfSourceConfig",
    "InitConfig",
    "LoggingConfig",
    "LrScheduleConfig",
    "MegastableConfig",
    "ModelConfig",
    "MonitorsConfig",
    "OptimizerConfig",
    "PipelineConfig",
    "RunConfig",
    "SourceConfig",
    "StdlibSourceConfig",
    "TensorParallelConfig",
    "TextSourceConfig",
    "TokenizerConfig",
    "TrainingConfig",
    "TransformersTokenizerConfig",
    "UnreadableRunFileError",
    "ZeroConfig",
    "json_schema",
    "load_run_file",
    "run_from_dict",
]
