"""Where metrics go besides metrics.jsonl. A sink is `Sink(run_dir, run_id, first_step, config)`, `log`, `close`.

Packages are imported when a sink is built. `run_id` is stable over resumes, so a tracker continues the same run.
"""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

from verl.core.registry import Table

SINKS = Table("report_to", {
    "tensorboard": "verl.core.report.sinks:TensorBoard",
    "wandb": "verl.core.report.sinks:WandB",
    "mlflow": "verl.core.report.sinks:MLflow",
    "trackio": "verl.core.report.sinks:Trackio",
})


def redact(text: str) -> str:
    """`text` without the secrets that tracker URLs and messages carry (write_token=..., hf_..., user:password@)."""
    text = re.sub(r"(?i)((?:write_|access_|api_)?(?:token|key)\s*[=:]\s*)[^\s&'\"]+", r"\1***", text)
    text = re.sub(r"\bhf_[A-Za-z0-9]{8,}", "hf_***", text)
    return re.sub(r"(://)[^/\s@]+@", r"\1***@", text)


class TensorBoard:
    """Event files under run_dir/tensorboard; steps that a resumed run repeats are purged."""

    def __init__(self, run_dir: Path, run_id: str, first_step: int, config: dict[str, Any]):
        from torch.utils.tensorboard import SummaryWriter
        self.writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=first_step)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class WandB:
    """Weights & Biases; project from WANDB_PROJECT, else `verl`."""

    def __init__(self, run_dir: Path, run_id: str, first_step: int, config: dict[str, Any]):
        import os

        import wandb
        self.run = wandb.init(project=os.environ.get("WANDB_PROJECT", "verl"), name=run_dir.name, id=run_id,
                              dir=str(run_dir), resume="allow", config=config)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.run.log(metrics, step=step)

    def close(self) -> None:
        self.run.finish()


class MLflow:
    """MLflow; server and experiment from its own environment variables. The run is found again by its tag."""

    def __init__(self, run_dir: Path, run_id: str, first_step: int, config: dict[str, Any]):
        import mlflow
        self.mlflow = mlflow
        found = mlflow.search_runs(filter_string=f"tags.verl_run = '{run_id}'", output_format="list")
        if found:
            mlflow.start_run(run_id=found[0].info.run_id)
        else:
            mlflow.start_run(run_name=run_dir.name, tags={"verl_run": run_id})
            mlflow.log_params({name: str(value)[:500] for name, value in config.items()})

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.mlflow.log_metrics(metrics, step=step)

    def close(self) -> None:
        self.mlflow.end_run()


class Trackio:
    """trackio; server and space from its own environment variables. Whatever it prints is printed without tokens."""

    def __init__(self, run_dir: Path, run_id: str, first_step: int, config: dict[str, Any]):
        import trackio
        self.trackio = trackio
        self._quietly(trackio.init, project="verl", name=f"{run_dir.name}-{run_id}", resume="allow", config=config)

    def _quietly(self, function: Any, **arguments: Any) -> None:
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
                function(**arguments)
        except Exception as error:
            raise RuntimeError(redact(f"trackio: {error}")) from None
        finally:
            print(redact(printed.getvalue()), end="")

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.trackio.log(metrics, step=step)

    def close(self) -> None:
        self._quietly(self.trackio.finish)
