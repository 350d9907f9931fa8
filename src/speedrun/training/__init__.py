"""The loop and what surrounds it: schedule, clock, device, run folder, checkpoints."""

from typing import TYPE_CHECKING

from speedrun.lazy import lazy

if TYPE_CHECKING:
    from speedrun.training import checkpoint, distributed, dryrun, run, runlog, scale, telemetry, trace
    from speedrun.training.clock import synchronize
    from speedrun.training.config import (
        Options,
        PublishedCurve,
        Recipe,
        ValidationConfig,
        as_tuple,
        differences,
        fields_of,
        meanings,
        to_dict,
        with_fields,
    )
    from speedrun.training.device import (
        CompilerConfig,
        Machine,
        by_name,
        check_processes,
        check_settings,
        choose,
        compiler_problem,
    )
    from speedrun.training.gpus import GPUS
    from speedrun.training.job import Job
    from speedrun.training.load import usable_cores
    from speedrun.training.loop import Loop
    from speedrun.training.memory import compiled_graph, gib, memory_of, problems_of
    from speedrun.training.memory import table as memory_table
    from speedrun.training.optimizers import MuonPart, OptimConfig, Part, SnooPart
    from speedrun.training.progress import Progress, status
    from speedrun.training.run import check_ranks, check_rules, check_supply, fit_to_tokens, hashes
    from speedrun.training.schedule import ScheduleConfig, Stage
    from speedrun.training.step import Trainer
    from speedrun.training.validate import validate as validation_loss
    from speedrun.training.warmup import made_up, warm_up
else:
    __getattr__, __all__ = lazy(__name__)
