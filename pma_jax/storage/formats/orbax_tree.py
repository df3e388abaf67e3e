"""The structure of a pytree that Orbax stores: the key path and type of each leaf, and the leaves that are no arrays.

Orbax writes three files beside the arrays of a tree:

    _METADATA           the key path and the type of every leaf, also of None, empty containers and strings
    _strings.json       the values of the strings; a leaf's name is a JSON pointer
    array_metadatas/*   per array, among others the algorithm of a typed random key (`jax.random.key`)
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pma_jax.config.errors import DamageError, UserError, error_line
from pma_jax.storage.formats.subtree import is_below
from pma_jax.storage.json_files import MAX_JSON_BYTES, read_json_object
from pma_jax.storage.matching import match_files

TREE_FILE, STRINGS_FILE, ARRAY_METADATA_FOLDER = "_METADATA", "_strings.json", "array_metadatas"
JAX_ARRAY, NUMPY_ARRAY, SCALAR, STRING = "jax.Array", "np.ndarray", "scalar", "string"
# Types of leaves that have no value: Orbax restores None or an empty container.
EMPTY_TYPES = frozenset({"None", "Dict", "List", "Tuple", "NamedTuple"})
SEQUENCE_KEY, _DICT_KEY = 1, 2


@dataclass(frozen=True)
class TreeLeaf:
    """A leaf of a stored pytree.

    Attributes:
        keys: The key path, outermost first: (key, type of the key: 1 for an index, 2 for a dictionary's key).
        value_type: What Orbax restores: one of the constants of this module, or of `EMPTY_TYPES`.
    """

    keys: tuple[tuple[str, int], ...]
    value_type: str

    @property
    def key_names(self) -> list[str]:
        """The keys as text."""
        return [key for key, _ in self.keys]

    @property
    def name(self) -> str:
        """The name under which Orbax stores the leaf."""
        return ".".join(self.key_names)

    @property
    def is_array(self) -> bool:
        """Whether the leaf is stored as an array: a JAX or NumPy array, or a Python number."""
        return "Array" in self.value_type or "ndarray" in self.value_type or self.value_type == SCALAR


@dataclass(frozen=True)
class TreeStructure:
    """The leaves of a stored pytree, in its order.

    Attributes:
        leaves: All leaves.
        strings: Name -> value of each string.
        random_keys: Name -> algorithm of each typed random key ("threefry2x32"), whose array holds the key's data.
        typed_tree: The JSON text of the tree with the types of its containers, if its writer enabled
            `support_rich_types`.
    """

    leaves: tuple[TreeLeaf, ...]
    strings: Mapping[str, str] = field(default_factory=dict)
    random_keys: Mapping[str, str] = field(default_factory=dict)
    typed_tree: str | None = None

    def below(self, prefixes: Sequence[Sequence[str]]) -> "TreeStructure":
        """Return the structure with only the leaves whose key path starts with one of `prefixes`."""
        leaves = tuple(leaf for leaf in self.leaves if is_below(leaf.key_names, prefixes))
        names = {leaf.name for leaf in leaves}
        return TreeStructure(
            leaves,
            {name: text for name, text in self.strings.items() if name in names},
            {name: text for name, text in self.random_keys.items() if name in names},
            # The text describes the complete tree.
            self.typed_tree if len(leaves) == len(self.leaves) else None,
        )


@dataclass(frozen=True)
class OrbaxItem:
    """What Orbax needs, besides the arrays, to restore the item of a checkpoint that holds a tree.

    Attributes:
        name: The item's name; "" if the tree is stored without items.
        tree: The tree, or the subtree that is read.
        handler: Name of the handler that restores the item; None for Orbax's default.
        is_v1: Whether the checkpoint has the file by which Orbax v1 recognizes its own checkpoints.
        sharding: The content of `_sharding`: for each array, its name in base64 -> its sharding when it was saved.
    """

    name: str
    tree: TreeStructure
    handler: str | None = None
    is_v1: bool = True
    sharding: Mapping[str, Any] = field(default_factory=dict)


def nested_tree(names: Iterable[str], value_type: str) -> TreeStructure:
    """Return the structure of nested dictionaries, given the names of their leaves, with "." between keys.

    Orbax restores a `JAX_ARRAY` with the sharding that was saved with it. Where none was, use `NUMPY_ARRAY`.
    """
    return TreeStructure(
        tuple(TreeLeaf(tuple((key, _DICT_KEY) for key in name.split(".")), value_type) for name in names)
    )


def flat_tree(names: Iterable[str], value_type: str) -> TreeStructure:
    """Return the structure of one dictionary with these keys."""
    return TreeStructure(tuple(TreeLeaf(((name, _DICT_KEY),), value_type) for name in names))


def read_tree(directory: Path, metadata: Mapping[str, Any]) -> TreeStructure:
    """Read the structure of the tree in `directory`, given the content of its `_METADATA`.

    Raises:
        DamageError: The files are corrupt or disagree.
        UserError: The tree is a single array without a key, or has a leaf of a type that is not Orbax's.
    """
    what = directory / TREE_FILE
    entries = metadata["tree_metadata"]
    leaves = [_parse_leaf(what, entry) for entry in (entries.values() if isinstance(entries, dict) else [None])]
    names: set[str] = set()
    for leaf in leaves:
        if not leaf.is_array and leaf.value_type != STRING:
            continue
        if not leaf.keys or not leaf.name:
            raise UserError(f"{what}: the tree is a single array without a name; save it in a dictionary to merge it")
        if not leaf.name.isprintable() or ".." in leaf.name.split("/") or leaf.name.startswith("/"):
            raise DamageError(f"{what}: names an array {leaf.name[:80]!r}, which is not a valid name")
        if leaf.name in names:
            raise DamageError(f"{what}: two leaves are both named {leaf.name[:80]!r}")
        names.add(leaf.name)
    typed_tree = metadata.get("value_metadata_tree")
    return TreeStructure(
        tuple(leaves),
        _read_strings(directory, [leaf.name for leaf in leaves if leaf.value_type == STRING]),
        _read_random_keys(directory),
        typed_tree if isinstance(typed_tree, str) else None,
    )


def _parse_leaf(what: Path, entry: Any) -> TreeLeaf:
    fields = entry if isinstance(entry, dict) else {}
    keys, value = fields.get("key_metadata"), fields.get("value_metadata")
    value_type = value.get("value_type", JAX_ARRAY) if isinstance(value, dict) else None
    if not isinstance(keys, list) or not isinstance(value_type, str):
        raise DamageError(f"{what}: is corrupt: {str(fields)[:80]}")
    parsed = []
    for key in keys:
        name, kind = (key.get("key"), key.get("key_type", _DICT_KEY)) if isinstance(key, dict) else (None, None)
        if type(name) not in (str, int) or kind not in (SEQUENCE_KEY, _DICT_KEY):
            raise DamageError(f"{what}: is corrupt: {str(key)[:80]} is not a key")
        if kind == SEQUENCE_KEY and not re.fullmatch(r"[0-9]{1,9}", str(name)):
            raise DamageError(f"{what}: is corrupt: {str(name)[:80]!r} is not an index of a list")
        parsed.append((str(name), kind))
    leaf = TreeLeaf(tuple(parsed), value_type)
    if not leaf.is_array and value_type != STRING and value_type not in EMPTY_TYPES:
        raise UserError(
            f"{what}: {leaf.name[:80]!r} has the type {value_type[:80]!r}, which only the program that saved it can "
            "read; save the checkpoint without it"
        )
    return leaf


def _read_strings(directory: Path, names: list[str]) -> dict[str, str]:
    path = directory / STRINGS_FILE
    stored = read_json_object(path) if names and path.is_file() else {}
    strings = {}
    for name in names:
        value: Any = stored
        for part in _pointer_parts(name):
            value = value.get(part) if isinstance(value, dict) else None
        if not isinstance(value, str):
            raise DamageError(f"{path}: has no text for {name[:80]!r}; the checkpoint is not complete, fetch it again")
        strings[name] = value
    return strings


def _pointer_parts(name: str) -> list[str]:
    """Return the keys of a JSON pointer (RFC 6901)."""
    return [part.replace("~1", "/").replace("~0", "~") for part in name.split("/")]


def _read_random_keys(directory: Path) -> dict[str, str]:
    algorithms: dict[str, str] = {}
    for path in sorted(match_files(directory / ARRAY_METADATA_FOLDER, "process_*")):
        entries = read_json_object(path).get("array_metadatas")
        for entry in entries if isinstance(entries, list) else []:
            fields = entry.get("array_metadata") if isinstance(entry, dict) else None
            fields = fields if isinstance(fields, dict) else {}
            extension = fields.get("ext_metadata")
            algorithm = extension.get("random_key_impl") if isinstance(extension, dict) else None
            if isinstance(algorithm, str) and algorithm:
                algorithms[str(fields.get("param_name"))] = algorithm
    return algorithms


def inline_leaf_names(path: Path) -> list[str]:
    """List the leaves whose values are in a msgpack file `checkpoint`, as early versions of Flax wrote it.

    It has the structure of the tree. Leaves that are stored as arrays of their own are texts "PLACEHOLDER://…", or
    specifications of tensorstore.

    Raises:
        DamageError: The file is corrupt.
        UserError: It is too large.
    """
    import msgpack

    if path.stat().st_size > MAX_JSON_BYTES:
        raise UserError(f"{path}: {path.stat().st_size:,} bytes is more than the limit of {MAX_JSON_BYTES:,}")
    try:
        tree = msgpack.unpackb(path.read_bytes(), strict_map_key=False, ext_hook=lambda code, data: code)
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise DamageError(f"{path}: is not a msgpack file ({error_line(error)[:100]}); fetch it again") from None
    names: list[str] = []
    todo: list[tuple[str, Any]] = [("", tree)]
    while todo:
        name, value = todo.pop()
        is_array = isinstance(value, dict) and {"driver", "kvstore"} <= value.keys()
        is_array = is_array or (isinstance(value, str) and value.startswith("PLACEHOLDER"))
        if isinstance(value, dict) and not is_array:
            todo += [(f"{name}.{key}" if name else str(key), child) for key, child in value.items()]
        elif value is not None and not is_array:
            names.append(name)
    return sorted(names)


def tree_texts(tree: TreeStructure, shapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]) -> dict[str, Any]:
    """Return path -> JSON value of the files that describe `tree`, as Orbax writes them for zarr 2 arrays in files.

    Args:
        tree: The structure.
        shapes: Name -> (shape, chunk shape) of each leaf that is stored as an array.
    """
    entries, arrays = {}, []
    for leaf in tree.leaves:
        value: dict[str, Any] = {"value_type": leaf.value_type, "skip_deserialize": leaf.value_type in EMPTY_TYPES}
        if leaf.value_type == JAX_ARRAY:
            shape, chunk = shapes[leaf.name]
            value["write_shape"] = list(shape)
            algorithm = tree.random_keys.get(leaf.name)
            extension = {"random_key_impl": algorithm} if algorithm else None
            fields = {"param_name": leaf.name, "write_shape": list(shape), "chunk_shape": list(chunk)}
            arrays.append({"array_metadata": {**fields, "ext_metadata": extension}})
        keys = [{"key": key, "key_type": kind} for key, kind in leaf.keys]
        entries[str(tuple(leaf.key_names))] = {"key_metadata": keys, "value_metadata": value}
    metadata = {
        "tree_metadata": entries,
        "use_ocdbt": False,
        "use_zarr3": False,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }
    texts: dict[str, Any] = {
        TREE_FILE: metadata | ({"value_metadata_tree": tree.typed_tree} if tree.typed_tree else {})
    }
    if tree.strings:
        texts[STRINGS_FILE] = _nest_strings(tree.strings)
    if arrays:
        texts[f"{ARRAY_METADATA_FOLDER}/process_0"] = {"array_metadatas": arrays}
    return texts


def _nest_strings(strings: Mapping[str, str]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for name, text in strings.items():
        *parents, last = _pointer_parts(name)
        place = nested
        for part in parents:
            place = place.setdefault(part, {})
        place[last] = text
    return nested


def structure_differences(expected: TreeStructure, actual: TreeStructure) -> list[str]:
    """List the differences in leaves that are no arrays, and in the algorithms of random keys, one line each."""
    wanted, found = _describe_leaves(expected), _describe_leaves(actual)
    return [
        f"{name} is {found.get(name, 'an array or absent')[:80]}, not {wanted.get(name, 'an array or absent')[:80]}"
        for name in sorted(wanted.keys() | found.keys())
        if wanted.get(name) != found.get(name)
    ]


def _describe_leaves(tree: TreeStructure) -> dict[str, str]:
    described = {name: f"a random key of {algorithm}" for name, algorithm in tree.random_keys.items()}
    for leaf in tree.leaves:
        if leaf.value_type == STRING:
            described[leaf.name] = f"the text {tree.strings[leaf.name]!r}"
        elif leaf.value_type in EMPTY_TYPES:
            described[leaf.name] = f"an empty {leaf.value_type}"
    return described
