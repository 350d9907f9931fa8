"""In which order a sharded step works, as tables of (operation, bucket)."""

import itertools
from collections.abc import Callable, Sequence
from typing import Literal

from speedrun.optim.arguments import require_choice
from speedrun.optim.sharded.plan import BucketPlan
from speedrun.optim.state import require

Op = Literal["reduce", "update", "gather", "finish"]
OPS: tuple[Op, ...] = ("reduce", "update", "gather", "finish")
Order = list[tuple[Op, str]]
Early = Literal["tables", "all"]


def early_reductions(plans: Sequence[BucketPlan], order: str | Order, early: Early | None = None) -> list[str]:
    """The buckets whose reductions begin during the backward pass; None takes `all` for `eager`, otherwise `tables`."""
    early = early or ("all" if order == "eager" else "tables")
    require_choice("early", early, Early)
    return [plan.label for plan in reversed(plans) if early == "all" or plan.kind != "owned"]


def resolve_order(order: str | Order, plans: Sequence[BucketPlan]) -> Order:
    """The table of a name, or a table as it is; ValueError unless each bucket has all of `OPS` once, in that order."""
    if isinstance(order, str):
        require(order in ORDERS, "order", order, f"one of: {', '.join(ORDERS)}, or a list")
        order = ORDERS[order](plans)
    for plan in plans:
        found = [op for op, label in order if label == plan.label]
        if found != list(OPS):
            raise ValueError(f"The order has {found} for {plan.label!r}; it must have {list(OPS)}, each once.")
    unknown = {label for _, label in order} - {plan.label for plan in plans}
    if unknown:
        labels = ", ".join(plan.label for plan in plans)
        raise ValueError(f"The order names {sorted(unknown)[0]!r}; the buckets are: {labels}.")
    return order


def sequential(plans: Sequence[BucketPlan]) -> Order:
    """One operation after the other, each for all buckets: every transfer is waited for."""
    return [(op, plan.label) for op in OPS for plan in plans]


def interleaved(plans: Sequence[BucketPlan]) -> Order:
    """Gradients of the matrices are reduced while Adam computes; Adam's weights are gathered while Muon computes.

    1. launch the reductions of the matrices (those of tables began during the backward pass);
    2. update each table as its gradient arrives, and launch its all-gather, but for the last table;
    3. update each bucket of matrices, launch its all-gather, and finish all of them but the last;
    4. finish the tables of 2;  5. all-gather the last table;  6. finish the last bucket;  7. finish the last table.
    """
    matrices = [plan.label for plan in plans if plan.kind == "owned"]
    others = [plan.label for plan in plans if plan.kind != "owned"]
    small = [plan.label for plan in plans if plan.kind == "replicated"]
    tables = [label for label in others if label not in small]
    order: Order = [("reduce", label) for label in others + matrices]
    for label in small + tables:
        order.append(("update", label))
        if label not in tables[-1:]:
            order.append(("gather", label))
    for label in matrices:
        order += [("update", label), ("gather", label)]
    order += [("finish", label) for label in matrices[:-1] + small + tables[:-1]]
    order += [("gather", label) for label in tables[-1:]]
    return order + [("finish", label) for label in matrices[-1:] + tables[-1:]]


def eager(plans: Sequence[BucketPlan]) -> Order:
    """Every transfer starts as soon as it can: for links that carry one transfer at a time, with `early="all"`.

    Gradients are taken to arrive in the reverse order of the buckets; after the first backward pass the table is made
    anew in the order in which they did (`Interleaved._learn_order`): the head's first, the embedding's last. Half of
    the matrices are updated while the last tables are still being reduced, the other half while tables are gathered.
    A bucket of matrices is updated last: with several buckets that is the shortest wait at the end.
    """
    coming = list(reversed(plans))
    matrices = [plan.label for plan in coming if plan.kind == "owned"]
    others = [plan.label for plan in coming if plan.kind != "owned"]
    before = [plan.label for plan in itertools.takewhile(lambda plan: plan.kind != "owned", coming)]
    half = (len(matrices) + 1) // 2
    turn = before + matrices[:half] + [label for label in others if label not in before] + matrices[half:]
    order: Order = [("reduce", plan.label) for plan in coming]
    for label in turn:
        order += [("update", label), ("gather", label)]
    return order + [("finish", label) for label in turn]


ORDERS: dict[str, Callable[[Sequence[BucketPlan]], Order]]
ORDERS = {"sequential": sequential, "interleaved": interleaved, "eager": eager}
