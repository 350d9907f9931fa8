"""The GPT: one model code for every recipe."""

from typing import TYPE_CHECKING

from speedrun.lazy import lazy

if TYPE_CHECKING:
    from speedrun.model.attention import Backend, Documents, attend, choose_backend, reference_attend, takes_cu_seqlens
    from speedrun.model.block import Windows
    from speedrun.model.config import (
        AttentionConfig,
        EmbeddingConfig,
        GPTConfig,
        HeadConfig,
        InitConfig,
        ResidualConfig,
    )
    from speedrun.model.flash import row_cu_seqlens
    from speedrun.model.gpt import GPT, MATRICES, Role, count_parameters, flops_per_token
    from speedrun.model.head import describe_fp8, fp8_linear, has_fp8_units, piece_rows
else:
    __getattr__, __all__ = lazy(__name__)
