"""The model that a config describes, built without memory before any rank is started."""

from functools import partial

from torchtune_cp.config import FullFinetuneConfig, component_callable, instantiate
from torchtune_cp.errors import ConfigError, UserError
from torchtune_cp.models import LanguageModel


def build_on_meta(cfg: FullFinetuneConfig) -> LanguageModel | None:
    """Build the config's model on the meta device, which refuses sizes that cannot be.

    Args:
        cfg: The typed config.

    Returns:
        The model; None when the component is not of this package, so that it may cost anything to build,
        or when the folder that describes the model cannot be read (yet).

    Raises:
        ConfigError: The component refuses its arguments or what stands in the folder.
    """
    import torch

    component = component_callable(cfg.model)
    if isinstance(component, partial):
        component = component.func
    if not component.__module__.startswith("torchtune_cp."):
        return None
    try:
        with torch.device("meta"):
            model = instantiate(cfg.model)
    except ConfigError as error:
        raise ConfigError([f"model: {problem}" for problem in error.problems]) from None
    except UserError as error:
        if isinstance(error.__cause__, OSError):
            return None  # a folder that is not there; the run says so
        raise ConfigError(f"model: {error}") from None
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ConfigError(f"model: {' '.join(str(error).split())}") from None
    return model if isinstance(model, LanguageModel) else None
