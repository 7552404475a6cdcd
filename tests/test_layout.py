"""Imports point downward, and no module has grown into two subjects."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1] / "dflash_jax"

RANKS = [
    {"errors"},
    {"sections"},
    {"config"},
    {"cli", "parallel"},
    {"models", "data", "telemetry"},
    {"decoding"},
    {"training", "assets"},
]
"""Rooms from the bottom up. A room may import what lies below it, and itself."""


def rank(room):
    return next(index for index, rooms in enumerate(RANKS) if room in rooms)


def rooms_imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom):
            whole_rooms = [f"dflash_jax.{alias.name}" for alias in node.names]
            names = whole_rooms if node.module == "dflash_jax" else [node.module]
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for name in names:
            if name and name.startswith("dflash_jax."):
                yield name.split(".")[1]


def test_imports_point_downward():
    for path in ROOT.rglob("*.py"):
        room = path.relative_to(ROOT).parts[0].removesuffix(".py")
        if room == "__init__":
            continue
        for imported in rooms_imported(path):
            allowed = imported == room or rank(imported) < rank(room)
            assert allowed, f"{path.relative_to(ROOT)} imports {imported}"


def test_modules_have_one_subject():
    for path in ROOT.rglob("*.py"):
        assert len(path.read_text().splitlines()) <= 450, path
