"""Names of weights as the files of a Hugging Face directory have them, and as the model built from it has them.

While Transformers loads weights, it renames them, stacks experts and joins or cuts projections; while it saves, it undoes
this. Its own rules and its own functions are used here, on tensors without values: they say which elements of which stored
tensors make up each tensor of the model, and the other way round.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.errors import ModelError
from shardwright.models.tensor_tracing import Origin, Stored, Traced, traced

Like = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a tensor."""


class HubNames:
    """Transformers' rules for one model, and what these rules ask of the model: its config and the shapes of its tensors.

    This object stands for the model in Transformers' functions; a rank that holds a part of the model could not pass the model.
    kept: of weights that are tied, the name under which they are saved, by their first name.
    """

    def __init__(self, model: Any) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping

        self.config, self.base_model_prefix = model.config, model.base_model_prefix
        held: dict[str, Tensor] = model.state_dict(keep_vars=True)
        self._shapes = {name: tuple(tensor.shape) for name, tensor in held.items()}
        self.kept = _kept(model, held)
        self._on_loading = get_model_conversion_mapping(model)
        self._on_saving = get_model_conversion_mapping(model, add_legacy=False)
        self._weight_conversions: list[Any] | None = None  # read by Transformers' function for saving
        self._unsaved = frozenset(getattr(model, "_keys_to_ignore_on_save", None) or ())

    def get_parameter(self, name: str) -> Tensor:
        """The parameter `name` of the unsplit model, on meta."""
        return torch.empty(self._shapes[name], device="meta")

    get_parameter_or_buffer = get_parameter

    def loaded(self, files: Mapping[str, Like]) -> dict[str, Origin]:
        """Every tensor that the `files` give, by the model's name. What has no place in the model keeps its renamed name.

        Raises `ModelError` where stored tensors do not fit together, or two of them are the same tensor of the model.
        """
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key

        rules = copy.deepcopy(self._on_loading)  # a rule remembers what it has matched
        renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
        found: dict[str, Origin] = {}
        groups: dict[str, tuple[Any, list[str]]] = {}
        for name in sorted(files, key=dot_natural_key):
            renamed, pattern = self._renamed(name, renamings, converters)
            if pattern is None:
                _put(found, renamed, Stored(name, files[name][0]))
                continue
            if renamed not in groups:
                groups[renamed] = (copy.deepcopy(by_pattern[pattern]), [])
            rule, names = groups[renamed]
            rule.add_tensor(renamed, name, pattern, traced(name, *files[name]))
            names.append(name)
        for renamed, (rule, names) in groups.items():
            for name, tensor in self._converted(rule, renamed, names).items():
                _put(found, name, tensor.origin)
        # as Transformers notes it: what was used for loading is undone for saving
        self._weight_conversions = [rule for rule in rules if rule.was_used()]
        return found

    def _renamed(self, name: str, renamings: list[Any], converters: list[Any]) -> tuple[str, str | None]:
        """(name in the model, pattern of the rule that converts the tensor or None)."""
        from transformers.core_model_loading import rename_source_key

        known: Any = self._shapes
        renamed, pattern = rename_source_key(name, renamings, converters, self.base_model_prefix, known)
        if renamed not in known and name in known:  # the rule was meant for older files
            return rename_source_key(name, [], [], self.base_model_prefix, known)
        return renamed, pattern

    def _converted(self, rule: Any, renamed: str, names: list[str]) -> dict[str, Traced]:
        try:
            made = rule.convert(renamed, model=self, config=self.config)
        except Exception as error:  # Transformers and torch refuse in several ways
            shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            raise ModelError(
                f"{renamed} cannot be made from {shown}: {str(error).splitlines()[0]}.",
                f"Transformers converts these tensors by {rule.operations}.",
                "Check that the files belong together and to this config.json. Otherwise load and save the model once with "
                "Transformers.",
            ) from error
        return {name: t[0] if isinstance(t, list) else t for name, t in made.items()}

    def saved(self, tensors: Mapping[str, Tensor], pretrained: bool) -> dict[str, Origin]:
        """What `save_pretrained` of Transformers would write of a model that holds `tensors` (only shapes and dtypes count).

        By the name in the files, made of tensors under the model's names. pretrained: `loaded` was called for it.
        """
        from transformers.core_model_loading import PrefixChange, revert_weight_conversion

        if not pretrained:  # a prefix that nobody has seen in files is not made up
            self._weight_conversions = [rule for rule in self._on_saving if not isinstance(rule, PrefixChange)]
        given = {
            name: traced(name, tensor.shape, tensor.dtype)
            for name, tensor in tensors.items()
            if name not in self._unsaved
        }
        written: dict[str, Traced] = revert_weight_conversion(self, given)
        return {name: tensor.origin for name, tensor in written.items()}


def hub_names(model: nn.Module) -> HubNames | None:
    """The names of `model` in files; None for a model that is not Transformers', whose names are its own."""
    from transformers import PreTrainedModel

    return HubNames(model) if isinstance(model, PreTrainedModel) else None


def _kept(model: Any, held: Mapping[str, Tensor]) -> dict[str, str]:
    """Tied weights are saved once: under a name that no rule of the model calls the tied one, else the last in order."""
    groups: dict[int, list[str]] = {}
    for name, tensor in held.items():
        groups.setdefault(id(tensor), []).append(name)
    tied = [
        f"{path}.{pattern}" if path else pattern
        for path, module in model.named_modules()
        for pattern in (getattr(module, "_tied_weights_keys", None) or ())
    ]
    kept = {}
    for names in groups.values():
        main = [name for name in sorted(names) if not any(re.search(pattern, name) for pattern in tied)]
        kept[names[0]] = main[0] if main else max(names)
    return kept


def _put(found: dict[str, Origin], name: str, origin: Origin) -> None:
    if name in found:
        first, second = next(found[name].stored()), next(origin.stored())
        raise ModelError(
            f"{first} and {second} are both {name} of the model.",
            "One of the two would be lost.",
            "Remove one of them from the files.",
        )
    found[name] = origin
