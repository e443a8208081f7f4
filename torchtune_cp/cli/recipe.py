"""A recipe file: is it shipped, and which config class checks its configs?"""

import ast
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path

from torchtune_cp.config import schema
from torchtune_cp.config.entry_point import one_line, trust_recipe_folder
from torchtune_cp.config.locate import recipes_dir
from torchtune_cp.errors import ConfigError

#: What the configs of the shipped recipes are; a test holds it against the recipes.
SHIPPED_CONFIG_CLASSES: dict[str, type[schema.FullFinetuneConfig]] = {
    "full_finetune_distributed": schema.FullFinetuneConfig,
    "esm2_mlm_distributed": schema.MaskedLMConfig,
}


@dataclass(frozen=True)
class Recipe:
    """A shipped recipe, or the user's own."""

    path: Path

    @property
    def is_shipped(self) -> bool:
        """Whether it came with the package."""
        return self.path.parent.resolve() == recipes_dir().resolve()

    def trust(self) -> None:
        """Let configs name the modules in the folder of a user's recipe."""
        trust_recipe_folder(self.path)
        if str(self.path.parent) not in sys.path:
            sys.path.append(str(self.path.parent))

    def config_class(self) -> type[schema.FullFinetuneConfig] | None:
        """Return the config class of a shipped recipe, or of one of the user.

        For the latter it is the `@config.parse(schema=...)` in its source. The source is read, not run: a
        recipe may import anything. Only for a class of the user is it imported, as they are about to
        run it, and only where importing it does not start it.

        Returns:
            None for a raw config, and for a class that is no `FullFinetuneConfig`: then only
            the components can be checked.

        Raises:
            ConfigError: The file is no Python file, or cannot be imported for its class.
        """
        if self.is_shipped and self.path.stem in SHIPPED_CONFIG_CLASSES:
            return SHIPPED_CONFIG_CLASSES[self.path.stem]
        try:
            tree = ast.parse(self.path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError) as error:
            raise ConfigError(f"{self.path} is no Python file: {error}") from None
        for node in tree.body:
            if not isinstance(node, ast.FunctionDef):
                continue
            for decorator in node.decorator_list:
                name = _schema_name(decorator)
                found = getattr(schema, name, None) if name else None
                if isinstance(found, type):
                    return found
                if name is not None and not _calls(tree, node.name):
                    return self._own_class(name)
        return None

    def _own_class(self, name: str) -> type[schema.FullFinetuneConfig] | None:
        self.trust()
        module_name = f"_tune_recipe_{self.path.stem}"
        spec = importlib.util.spec_from_file_location(module_name, self.path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module  # where a dataclass looks for what its annotations mean
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            raise ConfigError(
                f"{self.path} cannot be imported for its {name}: {one_line(error)}"
            ) from error
        found = getattr(module, name, None)
        is_ours = isinstance(found, type) and issubclass(found, schema.FullFinetuneConfig)
        return found if is_ours else None


def _schema_name(decorator: ast.expr) -> str | None:
    if not isinstance(decorator, ast.Call):
        return None
    for keyword in decorator.keywords:
        if keyword.arg == "schema":
            value = keyword.value
            if isinstance(value, ast.Name):
                return value.id
            if isinstance(value, ast.Attribute):
                return value.attr
    return None


def _calls(tree: ast.Module, name: str) -> bool:
    """Whether importing the module would call a function: at top level, without `if __name__`."""
    return any(
        isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == name
        for node in tree.body
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.If))
        for call in ast.walk(node)
    )
