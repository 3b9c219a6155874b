"""Colour profiles that are not applied are named if they give the colours of an image another meaning than sRGB."""

import io
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageCms

from fedfm.data.colour_profiles import is_other
from fedfm.data.load import load_table
from fedfm.data.spec import DataSpec

SRGB = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
# Red, green and blue of Display P3 for D50, from the profile that Apple ships.
P3 = {b"rXYZ": (0.5151, 0.2412, -0.0011), b"gXYZ": (0.2919, 0.6922, 0.0419), b"bXYZ": (0.1572, 0.0666, 0.7841)}


def with_primaries(primaries):
    """The profile of sRGB with other colours of red, green and blue."""
    made = bytearray(SRGB)
    (count,) = struct.unpack_from(">I", made, 128)
    for i in range(count):
        name, start, _ = struct.unpack_from(">4sII", made, 132 + 12 * i)
        if name in primaries:
            struct.pack_into(">3i", made, start + 8, *(round(v * 65536) for v in primaries[name]))
    return bytes(made)


def test_another_profile_has_other_colours_in_a_viewer():
    """The colour engine of Pillow (LittleCMS) changes the pixels just where a profile counts as another one."""
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (16, 16, 3)).astype(np.uint8))
    for profile, other in ((with_primaries(P3), True), (SRGB, False)):
        read = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        shown = ImageCms.profileToProfile(image, read, ImageCms.createProfile("sRGB"))
        assert bool(np.abs(np.asarray(shown, int) - np.asarray(image, int)).max() > 5) is other is is_other(profile)


@settings(deadline=None)
@given(st.binary(max_size=300) | st.integers(0, len(SRGB)).map(lambda n: SRGB[:n]))
def test_a_damaged_profile_is_no_fault(profile):
    assert is_other(profile) in (True, False)
    assert not is_other(None)


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "TIFF"])
def test_images_with_another_profile_are_counted(form, tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        for i in range(4):
            profile = {0: with_primaries(P3), 1: SRGB}.get(i)
            shade = np.full((8, 8, 3), 40 * i + 10 * (name == "a"), np.uint8)
            Image.fromarray(shade).save(tmp_path / name / f"{i}.{form.lower()}", form, icc_profile=profile)
    (text,) = (t for t in load_table(DataSpec(path=str(tmp_path)), seed=0).notices if "profile" in t)
    assert text.startswith(f"2 of 8 images of {tmp_path} have colours of print or another space (a profile other than")
