"""How docs/config.md spells a config key: its type and its default, from the schema itself."""

from __future__ import annotations

from dataclasses import MISSING

from omegaconf import DictConfig, ListConfig

from torchtune_cp.config.schema import FullFinetuneConfig, _keys


def _spelt(value: object) -> str:
    if value is None:
        return "`null`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, dict):
        return f"`{value['_component_']}`"
    return f"`{value}`"


def _type(key) -> str:
    rule, parts = key.rule, []
    for kind in key.accepted:
        if kind is bool:
            parts.append("true or false")
        elif kind is int:
            also = "".join(f" or {other}" for other in rule.also)
            parts.append("integer" if rule.low is None else f"integer, at least {rule.low}{also}")
        elif kind is float:
            least = f"number, at least {rule.low}"
            parts.append(least if rule.above is None else f"number above {rule.above:g}")
        elif kind is str:
            parts.append(
                " ".join(f"`{c}`" for c in rule.choices)
                if rule.choices
                else "dotted path"
                if key.name == "collate_fn"
                else "string"
            )
        elif kind is list:
            parts.append("list of strings")
        elif kind is DictConfig:
            parts.append("mapping" if key.name == "compile" else "component")
        elif kind is ListConfig:
            parts.append("list of components")
        else:
            assert kind is type(None), kind
            parts.append("null")
    return "; ".join(parts)


def rows() -> dict[str, tuple[str, str]]:
    """Key to (type, default) as the page must give them."""
    return {
        key.name: (_type(key), "required" if key.default is MISSING else _spelt(key.default))
        for key in _keys(FullFinetuneConfig)
    }
