"""The schema of a file of settings where editors find it.

There is no public address of it yet, so it lies beside the files: a first line of a YAML file names
it for any editor with a YAML language server, and VS Code's settings of the folder name it for
files without that line.
"""

import json
from pathlib import Path
from typing import Any

from lema.errors import ConfigError
from lema.storage.atomic import replace_file
from lema.storage.regular import read_regular

__all__ = ["MODELINE", "SCHEMA", "wire_editor", "write_schema"]

SCHEMA = Path(".lema", "schema.json")  # below the folder of the files
MODELINE = f"# yaml-language-server: $schema={SCHEMA.as_posix()}"
SETTINGS = Path(".vscode", "settings.json")
KEY = "yaml.schemas"
PATTERNS = ["*.lema.yaml", "*.lema.yml"]  # files that are LEMA's by their names
MARK = b"model_name_or_path:"  # in others


def write_schema(folder: Path) -> Path:
    """Write the schema below a folder, and return its file; `DiskError`: it cannot be written."""
    from lema.train.phases.schema import file_schema

    file = folder / SCHEMA
    content = (json.dumps(file_schema(), indent=1) + "\n").encode()
    if not (file.is_file() and read_regular(file) == content):
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, content)
    return file


def wire_editor(folder: Path) -> Path:
    """Have VS Code check the files of settings in a folder by the schema below it: those that there
    are, and those that end in `.lema.yaml`. Other settings of the folder stay. Return the file that
    says so; `ConfigError`: it has comments, or is no JSON, and is left as it is."""
    file = folder / SETTINGS
    settings: dict[str, Any] = {}
    name = f"./{SCHEMA.as_posix()}"
    patterns = PATTERNS + sorted(
        path.name for path in folder.glob("*.y*ml") if path.is_file() and MARK in path.read_bytes()
    )
    if file.exists():
        try:
            settings = json.loads(read_regular(file))
            schemas = settings.setdefault(KEY, {})
            earlier = schemas.get(name, [])
        except (ValueError, AttributeError) as error:
            how = f'add by hand: "{KEY}": {json.dumps({name: patterns})}'
            raise ConfigError(
                "this file is no plain JSON object, so it is not changed", where=str(file), how=how
            ) from error
        patterns = [*([earlier] if isinstance(earlier, str) else earlier), *patterns]
    settings[KEY] = {**settings.get(KEY, {}), name: list(dict.fromkeys(patterns))}
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_file(file, (json.dumps(settings, indent=2) + "\n").encode())
    return file
