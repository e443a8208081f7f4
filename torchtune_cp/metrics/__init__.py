"""What a run reports: loggers, the metrics file, progress, memory and throughput."""

from torchtune_cp.metrics.interface import MetricLogger
from torchtune_cp.metrics.jsonl import METRICS_NAME, MetricsFile
from torchtune_cp.metrics.memory import memory_stats, peak_memory_bytes
from torchtune_cp.metrics.metrics_lines import read_metrics
from torchtune_cp.metrics.progress import Progress
from torchtune_cp.metrics.tensorboard import TensorBoardLogger
from torchtune_cp.metrics.text_loggers import DiskLogger, StdoutLogger
from torchtune_cp.metrics.throughput import StepTimer
from torchtune_cp.metrics.wandb import WandBLogger

#: What a config may name, by key; see `torchtune_cp.config.allow`.
COMPONENTS = {"metric_logger": ("DiskLogger", "StdoutLogger", "TensorBoardLogger", "WandBLogger")}

__all__ = [
    "METRICS_NAME",
    "DiskLogger",
    "MetricLogger",
    "MetricsFile",
    "Progress",
    "StdoutLogger",
    "StepTimer",
    "TensorBoardLogger",
    "WandBLogger",
    "memory_stats",
    "peak_memory_bytes",
    "read_metrics",
]
