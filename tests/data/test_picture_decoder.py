"""One decoder: any mode of Pillow, any orientation, alpha, pages and wide greys, against pixels computed by hand."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from fedfm.data.load import load_table
from fedfm.data.pictures import decode, look, rgb, upright
from fedfm.data.rows_to_predict import read_inputs
from fedfm.data.spec import DataSpec
from fedfm.errors import InputError
from fedfm.models.images import pixels

# How an upright picture (H, W, ...) is stored under each EXIF orientation, which says where row 0 and column 0 lie.
STORED: dict[int, Callable[[np.ndarray], np.ndarray]] = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.swapaxes(0, 1),
    6: lambda a: a.swapaxes(0, 1)[::-1],
    7: lambda a: a.swapaxes(0, 1)[::-1, ::-1],
    8: lambda a: a.swapaxes(0, 1)[:, ::-1],
}
FORMS = {"CMYK": "TIFF", "I": "TIFF"}  # of modes that PNG does not have


def encoded(picture: Image.Image, orientation: int = 1, form: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = orientation
    picture.save(out, form, exif=exif, **options)
    return out.getvalue()


def over_white(colours: np.ndarray, alpha: np.ndarray) -> np.ndarray:
    """Porter and Duff's "over" on white, in exact arithmetic."""
    a = alpha.astype(float)[..., None] / 255
    return a * colours + (1 - a) * 255


def stored(mode: str, shown: np.ndarray, alpha: np.ndarray, palette: np.ndarray) -> tuple[Image.Image, np.ndarray]:
    """A picture of this mode made of these pixels (H, W, 3) and (H, W), and the colours that one sees in it."""
    grey = np.ascontiguousarray(shown[..., 0])
    thrice = np.repeat(grey[..., None], 3, 2)
    if mode == "1":
        return Image.fromarray(grey > 127), np.where(thrice > 127, 255, 0)
    if mode == "L":
        return Image.fromarray(grey), thrice
    if mode == "LA":
        return Image.fromarray(np.stack([grey, alpha], -1), mode), over_white(thrice, alpha)
    if mode == "P":
        picture = Image.fromarray(grey)
        picture.putpalette(palette.tobytes())
        return picture, palette[grey]
    if mode == "P, one clear":
        picture, _ = stored("P", shown, alpha, palette)
        picture.info["transparency"] = int(grey[0, 0])
        return picture, over_white(palette[grey], np.where(grey == grey[0, 0], 0, 255))
    if mode == "RGB":
        return Image.fromarray(np.ascontiguousarray(shown)), shown
    if mode == "RGBA":
        return Image.fromarray(np.dstack([shown, alpha]), mode), over_white(shown, alpha)
    if mode == "CMYK":
        inks = np.dstack([255 - shown, np.zeros(shown.shape[:2], np.uint8)])  # no black
        return Image.fromarray(inks, mode), shown
    wide = grey.astype({"I;16": np.uint16, "I": np.int32}[mode]) * 16  # 12 bits
    wide[0, 0] = 4095
    return Image.fromarray(wide), np.repeat(wide[..., None] / 4095 * 255, 3, 2)


@settings(max_examples=60, deadline=None)
@given(
    mode=st.sampled_from(["1", "L", "LA", "P", "P, one clear", "RGB", "RGBA", "CMYK", "I;16", "I"]),
    orientation=st.sampled_from(sorted(STORED)),
    seed=st.integers(0, 2**32 - 1),
    opaque=st.booleans(),
)
def test_every_mode_and_orientation_gives_the_visible_pixels(
    mode: str, orientation: int, seed: int, opaque: bool
) -> None:
    rng = np.random.default_rng(seed)
    raw, palette = rng.integers(0, 256, (5, 7, 3), np.uint8), rng.integers(0, 256, (256, 3), np.uint8)
    alpha = np.full((5, 7), 255, np.uint8) if opaque else rng.integers(0, 256, (5, 7), np.uint8)
    picture, want = stored(mode, raw, alpha, palette)
    data = encoded(picture, orientation, FORMS.get(mode, "PNG"))
    got = STORED[orientation](np.asarray(rgb(data)).astype(float))  # of the picture that is seen, what was stored
    assert np.abs(got - want).max() <= 1
    one = look(data)
    assert one.fault is None
    assert one.transparent == (mode == "P, one clear" or (mode in ("LA", "RGBA") and not opaque))
    assert one.top == (4095 if mode in ("I;16", "I") else 0)


@pytest.mark.parametrize("mode", ["YCbCr", "HSV", "PA", "RGBX", "RGBa", "La"])
def test_modes_of_plugins_give_the_same_pixels(mode: str) -> None:
    """Smooth colours, since some of these modes have fewer; "a" is colour times alpha."""
    base = Image.new("RGBA", (4, 3), (200, 100, 50, 255 if mode[-1] != "a" else 128))
    through = base.convert("LA") if mode == "La" else base if mode == "RGBa" else base.convert("RGB")
    grey = np.asarray(base.convert("LA"))[..., :1].repeat(3, 2)
    colours = grey if mode == "La" else np.asarray(base)[..., :3]
    got = np.asarray(upright(through.convert(mode)).convert("RGB")).astype(float)
    assert np.abs(got - over_white(colours, np.asarray(base)[..., 3])).max() <= 5


def test_orientation_is_of_the_picture_not_of_its_format() -> None:
    """JPEG and TIFF, which Pillow reads in other ways than PNG, give the same upright pixels."""
    shown = np.zeros((16, 32, 3), np.uint8)
    shown[:8, :16] = 255
    for orientation, turn in STORED.items():
        for form in ("JPEG", "TIFF", "PNG", "WEBP"):
            data = encoded(Image.fromarray(np.ascontiguousarray(turn(shown))), orientation, form)
            assert np.abs(decode(data).astype(int) - shown).max() < 60, (orientation, form)


def test_damaged_exif_data_leave_the_picture_as_it_is_stored() -> None:
    out = io.BytesIO()
    Image.new("RGB", (4, 3), (9, 8, 7)).save(out, "PNG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff")
    assert decode(out.getvalue()).shape == (3, 4, 3)


def test_changes_and_losses_by_decoding_are_reported_once(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)

    def noise(*shape: int) -> np.ndarray:
        return rng.integers(0, 256, shape, np.uint8)

    for name in ("ant", "bee"):
        (tmp_path / name).mkdir()
        for i in range(3):
            Image.fromarray(noise(6, 6, 3)).save(tmp_path / name / f"{i}.png")
    frames = [Image.fromarray(noise(6, 6, 3)) for _ in range(3)]
    frames[0].save(tmp_path / "ant" / "a.gif", save_all=True, append_images=frames[1:])
    frames[0].save(tmp_path / "bee" / "a.tif", save_all=True, append_images=frames[1:])
    Image.fromarray(noise(6, 6, 4), "RGBA").save(tmp_path / "bee" / "b.png")
    Image.new("RGBA", (6, 6), (1, 2, 3, 255)).save(tmp_path / "bee" / "opaque.png")
    Image.fromarray(np.array([[0, 4000]], np.uint16)).save(tmp_path / "ant" / "c.png")
    Image.fromarray(np.array([[0, 40000]], np.uint16)).save(tmp_path / "ant" / "d.tif")
    table = load_table(DataSpec(path=str(tmp_path)), seed=0)
    said = "\n".join(table.notices)
    assert "2 of 12 images of" in said.split("several pages")[0]
    assert "1 of 12 images" in said.split("have transparent pixels")[0].splitlines()[-1]
    assert "scaled to 0..255: 1 from 0..4095 and 1 from 0..65535; if all should have one range" in said
    again = read_inputs(tmp_path, DataSpec(), kind="image")
    assert [n for n in again.notices if "images of" in n] == [n for n in table.notices if "images of" in n]


def test_all_ways_to_a_picture_give_the_same_pixels(tmp_path: Path) -> None:
    """A folder, a parquet file, a hub set and a prediction, for a picture that is turned, see-through and small."""
    from datasets import ClassLabel, Dataset, Features
    from datasets import Image as Picture

    rng = np.random.default_rng(1)
    data = [
        encoded(Image.fromarray(rng.integers(0, 256, (4, 4 + i % 2, 4), np.uint8), "RGBA"), 6 if i % 2 else 1)
        for i in range(6)
    ]
    rows = [{"bytes": d, "path": None} for d in data]
    features = Features({"image": Picture(), "label": ClassLabel(names=["a", "b"])})
    hub = Dataset.from_dict({"image": rows, "label": [0, 1] * 3}, features=features)
    hub.save_to_disk(str(tmp_path / "hub"))
    hub.to_parquet(str(tmp_path / "rows.parquet"))
    for i, d in enumerate(data):
        (tmp_path / "folder" / "ab"[i % 2]).mkdir(parents=True, exist_ok=True)
        (tmp_path / "folder" / "ab"[i % 2] / f"{i}.png").write_bytes(d)
    ways = [DataSpec(path=str(tmp_path / n)) for n in ("folder", "rows.parquet")] + [
        DataSpec(hub=str(tmp_path / "hub"))
    ]
    tables = [load_table(spec, seed=0) for spec in ways]
    tables += [read_inputs(tmp_path / n, DataSpec(), kind="image") for n in ("folder", "rows.parquet")]

    def pixels_of(table: Any) -> list[bytes]:
        return sorted(np.asarray(rgb(item)).tobytes() for item in table.inputs)

    assert all(pixels_of(table) == pixels_of(tables[0]) for table in tables)
    assert all(table.classes == ("a", "b") for table in tables[:3])
    prepared = [
        pixels(t.inputs, lambda some: torch.stack([torch.tensor(np.asarray(p.resize((4, 4)))) for p in some]))
        for t in tables
    ]
    assert all(torch.equal(p.flatten(1).sum(1).sort()[0], prepared[0].flatten(1).sum(1).sort()[0]) for p in prepared)


def test_masks_and_scans_are_named(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    for name in ("images", "masks"):
        (tmp_path / "set" / name).mkdir(parents=True)
        for i in range(3):
            (tmp_path / "set" / name / f"{i}.png").write_bytes(encoded(Image.new("L", (4, 4), i * 9)))
    (tmp_path / "set" / "images" / "a.dcm").write_bytes(b"scan")
    said = "\n".join(load_table(DataSpec(path=str(tmp_path / "set")), seed=0).notices)
    assert "masks of the second, name the folders images and masks" in said
    assert "convert DICOM and NIfTI files first" in said
    pictures = pyarrow.array([{"bytes": encoded(Image.new("L", (4, 4))), "path": None}] * 3)
    for second in ("other", "label"):  # with "mask" it would be segmentation
        pyarrow.parquet.write_table(pyarrow.table({"image": pictures, second: pictures}), tmp_path / "a.parquet")
        with pytest.raises(InputError, match=r'no column "label" of classes; columns .* several images per row'):
            load_table(DataSpec(path=str(tmp_path / "a.parquet")), seed=0)


def test_a_missing_or_broken_picture_of_a_table_is_named(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    good = encoded(Image.new("L", (4, 4)))
    (tmp_path / "there.png").write_bytes(good)
    for wrong, words in ((None, "row 2: no image"), (b"nothing", "row 2: not an image that can be read")):
        cells = [{"bytes": good, "path": None}, {"bytes": wrong, "path": None}]
        pyarrow.parquet.write_table(pyarrow.table({"image": cells, "label": [0, 1]}), tmp_path / "a.parquet")
        with pytest.raises(InputError, match=words):
            load_table(DataSpec(path=str(tmp_path / "a.parquet")), seed=0)
    cells = [{"bytes": good, "path": None}, {"bytes": None, "path": "there.png"}]
    pyarrow.parquet.write_table(pyarrow.table({"image": cells, "label": [0, 1]}), tmp_path / "a.parquet")
    table = load_table(DataSpec(path=str(tmp_path / "a.parquet")), seed=0)
    assert [decode(item).shape for item in table.inputs] == [(4, 4, 1)] * 2


def png16(pixels: np.ndarray) -> bytes:
    """A PNG file with 16 bits a channel of pixels (H, W, C), which Pillow does not write for colours."""
    height, width, channels = pixels.shape

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = struct.pack(">IIBBBBB", width, height, 16, {1: 0, 2: 4, 3: 2, 4: 6}[channels], 0, 0, 0)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("order", ["<u2", ">u2"])
def test_an_array_of_16_bits_is_read_as_files_with_its_pixels(tmp_path: Path, channels: int, order: str) -> None:
    rng = np.random.default_rng(3)
    x = np.stack([rng.integers(0, top + 1, (3, 5, channels), np.uint16) for top in (200, 3000, 4095, 65535)])
    files = tmp_path / "folder"
    for i, one in enumerate(x):
        (files / "ab"[i % 2]).mkdir(parents=True, exist_ok=True)
        (files / "ab"[i % 2] / f"{i}.png").write_bytes(png16(one))
    np.savez(tmp_path / "x.npz", x=x.astype(order), y=np.array([0, 1, 0, 1]))
    table, of_files = (load_table(DataSpec(path=str(tmp_path / name)), seed=0) for name in ("x.npz", "folder"))
    asked = read_inputs(tmp_path / "x.npz", DataSpec(), kind="image")
    assert table.inputs.dtype == np.uint8
    assert (asked.inputs == table.inputs).all()
    by_name = {Path(str(item)).name: decode(item) for item in of_files.inputs}
    assert all((one == by_name[f"{i}.png"]).all() for i, one in enumerate(table.inputs))

    def depth_notices(found: Any) -> list[str]:
        return [n.replace(found.source, "") for n in found.notices if "bits" in n]

    assert depth_notices(table) == depth_notices(of_files)
    assert len(depth_notices(table)) == 1


def test_colours_and_alpha_of_16_bits_are_reported() -> None:
    assert [look(png16(np.zeros((2, 2, c), np.uint16))).deep for c in (1, 2, 3, 4)] == [False, True, True, True]
    assert not look(encoded(Image.new("RGBA", (2, 2)))).deep


@pytest.mark.parametrize(
    ("x", "hint"),
    [
        (np.linspace(0, 1, 32).reshape(2, 4, 4, 1), '(x * 255).round().astype("uint8")'),
        (np.linspace(-1, 1, 32, dtype=np.float32).reshape(2, 4, 4, 1), "from -1 to 1: scale x to 0..255"),
        (np.arange(32).reshape(2, 4, 4, 1), 'x.astype("uint8")'),
        (np.arange(32).reshape(2, 4, 4, 1) * 100, 'x.astype("uint16")'),
        (np.ones((2, 4, 4, 3), bool), '(x * 255).round().astype("uint8")'),
        (np.zeros((2, 3, 4, 4), np.uint8), "x.transpose(0, 2, 3, 1)"),
        (np.zeros((2, 4, 4, 4), np.uint8), "x[..., :3]"),
        (np.zeros((2, 4, 4), np.uint16), "x[..., None]"),
    ],
)
def test_the_hint_for_an_array_of_another_form_makes_a_readable_one(tmp_path: Path, x: np.ndarray, hint: str) -> None:
    file = tmp_path / "x.npz"
    np.savez(file, x=x, y=np.arange(2))
    with pytest.raises(InputError) as refused:
        load_table(DataSpec(path=str(file)), seed=0)
    assert hint in str(refused.value)
    if hint.startswith(("x", "(x")):
        np.savez(file, x=eval(hint, {"x": x}), y=np.arange(2))
        assert load_table(DataSpec(path=str(file)), seed=0).inputs.shape[0] == 2
