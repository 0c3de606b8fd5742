"""The schema of a run file, and loading it with every fault listed at once."""

from megastable.config.batch_rampup import BatchRampupConfig
from megastable.config.data import (
    BlendSourceConfig,
    BpeTokenizerConfig,
    BytesTokenizerConfig,
    DataConfig,
    HfSourceConfig,
    IndexedSourceConfig,
    JsonlSourceConfig,
    SourceConfig,
    StdlibSourceConfig,
    SyntheticSourceConfig,
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
from megastable.config.lr_schedule import LrScheduleConfig
from megastable.config.model import ModelConfig
from megastable.config.parallelism import PipelineConfig, TensorParallelConfig
from megastable.config.reading.faults import ConfigError, Fault, UnreadableRunFileError
from megastable.config.reading.run_file import json_schema, load_run_file, run_from_dict
from megastable.config.run_config import MegastableConfig, RunConfig, differences, run_as_dict
from megastable.config.section import Amount
from megastable.config.training import CheckpointConfig, InitConfig, LoggingConfig, MonitorsConfig, TrainingConfig

__all__ = [
    "AdamParams",
    "Amount",
    "BatchRampupConfig",
    "Bf16Config",
    "BlendSourceConfig",
    "BpeTokenizerConfig",
    "BytesTokenizerConfig",
    "CheckpointConfig",
    "ConfigError",
    "DataConfig",
    "DataTypesConfig",
    "Fault",
    "Fp16Config",
    "HfSourceConfig",
    "IndexedSourceConfig",
    "InitConfig",
    "JsonlSourceConfig",
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
    "SyntheticSourceConfig",
    "TensorParallelConfig",
    "TextSourceConfig",
    "TokenizerConfig",
    "TrainingConfig",
    "TransformersTokenizerConfig",
    "UnreadableRunFileError",
    "ZeroConfig",
    "differences",
    "json_schema",
    "load_run_file",
    "run_as_dict",
    "run_from_dict",
]
