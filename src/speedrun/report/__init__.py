"""Pictures and pages about runs and recipes."""

from typing import TYPE_CHECKING

from speedrun.lazy import lazy

if TYPE_CHECKING:
    from speedrun.report import pages, send, traces
    from speedrun.report.ablation import ablation_svg
    from speedrun.report.records import records_svg
    from speedrun.report.schedules import schedule_svg
else:
    __getattr__, __all__ = lazy(__name__)
