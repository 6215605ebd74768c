"""Digits and pictures are read from the files of other packages, without importing them."""

import numpy as np
import pytest
import skimage.data
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from kfac_bench.data.images import digits, pictures
from kfac_bench.errors import UsageError


def test_digits_and_their_split_equal_those_of_scikit_learn():
    pixels, labels = digits.read()
    their_pixels, their_labels = load_digits(return_X_y=True)
    assert pixels.dtype == their_pixels.dtype
    assert np.array_equal(pixels, their_pixels)
    assert np.array_equal(labels, their_labels)
    theirs = train_test_split(
        range(len(labels)), test_size=digits.EVAL_SIZE, stratify=labels, random_state=0
    )
    assert digits.split(labels) == tuple(theirs)


@pytest.mark.parametrize("name", pictures.TRAIN + pictures.HELD_OUT)
def test_pictures_equal_those_of_scikit_image(name):
    function = {"ihc.png": "immunohistochemistry"}.get(name, name.partition(".")[0])
    with Image.open(digits.installed_file("skimage", f"data/{name}", "")) as image:
        assert np.array_equal(np.asarray(image), getattr(skimage.data, function)())


@pytest.mark.parametrize("package", ["no_such_package", "sklearn"])
def test_a_missing_package_or_file_names_what_to_install(package):
    with pytest.raises(
        UsageError, match=rf"no file a/b of {package}: .* type pip install '.\[x\]'"
    ):
        digits.installed_file(package, "a/b", "x")
