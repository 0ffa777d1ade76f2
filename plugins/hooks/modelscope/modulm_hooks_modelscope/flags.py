"""The flags of ModelScope."""

from modulm.contracts.flags import FlagGroup, flag, flag_group

__all__ = ["ModelScopeConfig"]


@flag_group
class ModelScopeConfig(FlagGroup):
    """Where names of the form owner/name lead."""

    title = "ModelScope"

    use_modelscope: bool = flag(
        False, "Download models, adapters and tokenizers from ModelScope, not from Hugging Face."
    )
    modelscope_token: str | None = flag(
        None, "Token for private models. Default: MODELSCOPE_API_TOKEN.", secret=True
    )
