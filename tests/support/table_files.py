"""Small tables of images, written with pyarrow as the hub and `datasets` write them."""

import io
import json

import numpy as np
import pyarrow
from PIL import Image
from pyarrow import ipc, parquet

SIDE = 8


def png(number):
    """Return a picture whose red pixels are all `number`, as a PNG file."""
    pixels = np.zeros((SIDE, SIDE, 3), np.uint8)
    pixels[..., 0] = number
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, "PNG")
    return content.getvalue()


def pictures(first, count, label="label", image="image", classes=3, names=()):
    """Return a table of pictures; `names` are the class names that `datasets` would store."""
    numbers = range(first, first + count)
    cells = [{"bytes": png(n), "path": None} for n in numbers]
    table = pyarrow.table(
        {"id": list(numbers), image: cells, label: [n % classes for n in numbers]}
    )
    if names:
        features = {label: {"names": list(names), "_type": "ClassLabel"}}
        info = json.dumps({"info": {"features": features}})
        table = table.replace_schema_metadata({"huggingface": info})
    return table


def write_hub(root, **splits):
    """Write `data/<split>-0000i-of-00002.parquet`: each split in two files."""
    (root / "data").mkdir(parents=True)
    for split, table in splits.items():
        half = len(table) // 2
        for i, part in enumerate((table[:half], table[half:])):
            # Groups of few rows: rows are read across the borders of groups and files.
            path = root / "data" / f"{split}-0000{i}-of-00002.parquet"
            parquet.write_table(part, path, row_group_size=3)
    return root


def write_saved(root, **splits):
    """Write what `DatasetDict.save_to_disk` writes: Arrow streams, and files that name them."""
    for split, table in splits.items():
        folder = root / split
        folder.mkdir(parents=True)
        files = []
        for i, part in enumerate((table[:5], table[5:])):
            name = f"data-0000{i}-of-00002.arrow"
            with ipc.new_stream(folder / name, part.schema) as writer:
                writer.write_table(part, max_chunksize=2)
            files.append({"filename": name})
        (folder / "state.json").write_text(json.dumps({"_data_files": files}))
        # What `Dataset.map` leaves behind is not data.
        (folder / "cache-1234.arrow").write_bytes(b"not a table")
    (root / "dataset_dict.json").write_text(json.dumps({"splits": list(splits)}))
    return root
