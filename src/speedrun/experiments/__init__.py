"""Many runs and what they prove."""

from typing import TYPE_CHECKING

from speedrun.lazy import lazy

if TYPE_CHECKING:
    from speedrun.experiments import ablate, records, statistics, sweep
    from speedrun.experiments.ablate import SHORTER, Line
    from speedrun.experiments.plan import PLAN, Plan
    from speedrun.experiments.race import RaceArgs, keep_dtype, make_plan, plan_challenge, run_plan, run_race
    from speedrun.experiments.records import Record, check_submission, problems_of_record, submit
    from speedrun.experiments.replay import replay_sides
    from speedrun.experiments.statistics import Effect, effect
    from speedrun.experiments.trial import ROWS, arithmetic_for, handle_sigterm, has_ended, read_rows, write_recipe
    from speedrun.experiments.verdict import Moments, RunSummary, TimeRatio, Verdict, read_summary, render
    from speedrun.experiments.verification import MANIFEST, RUNS, Finding, examine, files_of
else:
    __getattr__, __all__ = lazy(__name__)
