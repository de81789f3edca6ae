"""The parts of a causal language model, by name: repeated blocks, embedding, final norm, head, tied parameters."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardwright.errors import ModelError
from shardwright.torch_private import own_modules

NORM_NAMES = ("norm", "ln_f", "final_layernorm", "final_layer_norm", "final_norm", "norm_f")
WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


@dataclass(frozen=True)
class Parts:
    """The parts of a causal language model by fully qualified name.

    blocks: the repeated blocks in order, at least one.
    embedding, norm, head: module names; None where the model does not tell.
    tied: groups of names of one parameter.
    """

    blocks: tuple[str, ...]
    embedding: str | None
    norm: str | None
    head: str | None
    tied: tuple[tuple[str, ...], ...]


def is_transformers(model: nn.Module) -> bool:
    """Whether `model` is a causal language model of Transformers, which takes the keyword arguments of those."""
    return hasattr(model, "config") and hasattr(model, "generate")


def canonical_name(name: str) -> str:
    """`name` without the prefixes of torch.compile and activation checkpointing."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside DDP and `torch.compile`; `model` itself where it has no wrapper."""
    if isinstance(model, DistributedDataParallel):
        return unwrapped(model.module)
    inner = own_modules(model).get("_orig_mod")
    return model if inner is None else unwrapped(inner)


def canonical_parameters(model: nn.Module, remove_duplicate: bool = True) -> dict[str, nn.Parameter]:
    """Every parameter by its name in the unwrapped model, as in a checkpoint of Transformers.

    Tied weights appear under their first name; under all their names without `remove_duplicate`.
    """
    named = unwrapped(model).named_parameters(remove_duplicate=remove_duplicate)
    return {canonical_name(name): parameter for name, parameter in named}


def find_parts(model: nn.Module) -> Parts:
    """The parts of `model`: a Transformers causal LM, or any module.

    Blocks are the modules that Transformers says must not be split, else the elements of the `ModuleList` or `Sequential` with
    the most parameters, else the children that have parameters. Raises `ModelError` where a model has no blocks.
    """
    model = unwrapped(model)
    names = {id(module): canonical_name(name) for name, module in model.named_modules()}
    blocks = _blocks(model)
    if not blocks:
        raise ModelError(
            f"{type(model).__name__} has no submodule with parameters.",
            "A layout groups the parameters of repeated blocks.",
            "Put the parameters into submodules, for example one nn.ModuleList of blocks.",
        )
    embedding = _called(model, "get_input_embeddings")
    head = _called(model, "get_output_embeddings")
    return Parts(
        blocks=tuple(names[id(block)] for block in blocks),
        embedding=names.get(id(embedding)),
        norm=_norm(model, blocks[-1], names),
        head=names.get(id(head)),
        tied=tied_names(model),
    )


def beside_text(model: nn.Module) -> tuple[str, ...]:
    """Parameters that text does not reach in a model which reads images or sound too: all beside its text model and head."""
    text_config = getattr(getattr(model, "config", None), "get_text_config", None)
    if text_config is None or text_config(decoder=True) is getattr(model, "config", None):
        return ()
    parts = find_parts(model)
    if parts.embedding is None:
        return ()
    shared = [a for a, b in zip(parts.embedding.split("."), parts.blocks[0].split(".")) if a == b]
    inside = tuple(f"{name}." for name in (".".join(shared), parts.head) if name)
    return tuple(n for n in canonical_parameters(model) if shared and not n.startswith(inside))


def tied_names(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Groups of canonical parameter names that are the same `nn.Parameter`, in the model's order."""
    groups: dict[int, list[str]] = {}
    for name, parameter in canonical_parameters(model, remove_duplicate=False).items():
        groups.setdefault(id(parameter), []).append(name)
    return tuple(tuple(names) for names in groups.values() if len(names) > 1)


def _called(model: nn.Module, method: str) -> nn.Module | None:
    get = getattr(model, method, None)
    return get() if callable(get) else None


def _blocks(model: nn.Module) -> list[nn.Module]:
    unsplit = set(getattr(model, "_no_split_modules", None) or ())
    lists = _lists(model)
    for candidate in lists:
        if unsplit and all(_class_name(child) in unsplit for child in candidate):
            return list(candidate)
    sizes = [sum(p.numel() for p in candidate.parameters()) for candidate in lists]
    if any(sizes):
        # the first of the largest: an outer list holds at least as much as a list inside it
        return list(lists[sizes.index(max(sizes))])
    return [child for child in model.children() if any(True for _ in child.parameters())]


def _lists(model: nn.Module) -> list[nn.ModuleList | nn.Sequential]:
    """Lists of modules around the embedding of tokens, those nearest to it: a vision tower has blocks of its own."""
    named = [(n, m) for n, m in model.named_modules() if isinstance(m, (nn.ModuleList, nn.Sequential)) and len(m)]
    embedding = _called(model, "get_input_embeddings")
    path = next((name for name, module in model.named_modules() if module is embedding), "")
    while path:
        path = path.rpartition(".")[0]
        if inside := [module for name, module in named if name.startswith(f"{path}." if path else "")]:
            return inside
    return [module for _, module in named]


def _class_name(module: nn.Module) -> str:
    """The class name of `module` before `fully_shard`, which makes a subclass with the prefix FSDP (torch 2.11 to 2.14)."""
    return type(module).__name__.removeprefix("FSDP")


def _norm(model: nn.Module, last_block: nn.Module, names: dict[int, str]) -> str | None:
    """The norm after the blocks: a sibling of the list of blocks with one of the usual names."""
    path = names[id(last_block)].split(".")
    for depth in range(len(path) - 1, -1, -1):
        parent = ".".join(path[:depth])
        for name in NORM_NAMES:
            full = f"{parent}.{name}" if parent else name
            if full in names.values():
                return full
    return None
