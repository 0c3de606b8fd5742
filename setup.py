"""Package metadata and dependencies. Tested versions stand in constraints.txt."""

from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
namespace: dict[str, str] = {}
exec((HERE / "megastable" / "__init__.py").read_text(encoding="utf-8"), namespace)

PLOT = ["matplotlib>=3.8", "plotly>=6"]

setup(
    name="megastable",
    version=namespace["__version__"],
    description="Stable pre-training of GPT models on DeepSpeed's pipeline engine, with a global batch ramp",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    python_requires=">=3.11",
    packages=find_packages(include=["megastable", "megastable.*"]),
    package_data={"megastable.cli": ["report_page/*", "timeline.css"]},
    install_requires=[
        "torch>=2.13,<2.14",
        "deepspeed==0.19.8",
        "datasets>=4",
        "filelock>=3.13",
        "numpy>=2",
        "psutil>=5.9",
        "pyarrow>=19",
        "pydantic>=2.10",
        "rich>=13",
        "safetensors>=0.5",
        "tensorboard>=2.17",
        "tokenizers>=0.21",
        "transformers>=5",
        "typer>=0.15",
        "xxhash>=3",
    ],
    extras_require={
        "plot": PLOT,
        "dev": [
            *PLOT,
            "hypothesis>=6.100",
            "jsonschema>=4.23",
            "megatron-core==0.16.1",
            "mypy>=1.15",
            "pre-commit>=4",
            "pytest>=8",
            "pytest-timeout>=2.3",
            "ruff>=0.9",
        ],
    },
    entry_points={"console_scripts": ["megastable=megastable.cli.main:main"]},
)
