"""Pictures by formula: auxiliary rows that need no file, for the intervals of a polynomial student.

Photographs lack the blank areas and hard edges of sketches and scans. So a student whose intervals were measured on
photographs alone overflows on these. The drawn pictures have such areas and edges. They come from a seed: dead leaves
(Lee, Mumford, Huang. Occlusion models for natural images. IJCV 2001), strokes on paper, filled shapes on a flat ground,
text, noise with a spectrum of 1 / f, grey bodies on black as in a scan, half-tone dots, and noise in squares of several
sizes. Each of them may be grey, inverted, or of high contrast.

An enlarged picture has no detail of one pixel. So a part of them is drawn at the student's own size, and the others
smaller: the student's preprocessing enlarges these as it enlarges small photographs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedfm import seeds

Pixels = NDArray[np.float64]  # (side, side, 3), 0 to 1
_GREY, _INVERTED, _HARD = 0.35, 0.15, 0.25  # probabilities of the changes that a picture may get
_OWN = 0.4  # probability that a picture is drawn at the student's own size
_SMALLEST = 0.4  # smallest side of the others, of the student's
_UNIT = 128  # structures are this many units wide


def drawn_pictures(side: int, seed: int, stop: int, start: int = 0) -> list[Any]:
    """Draw the PIL pictures ``start`` to ``stop`` - 1 of a seed, squares in RGB; the kinds take turns.

    Args:
        side: of the student's pictures, in pixels; none is larger, and some are exactly as large.
    """
    from PIL import Image

    pictures = []
    for number in range(start, stop):
        rng = seeds.generator(seed, "drawn pictures", number)
        own = side if rng.random() < _OWN else max(2, round(side * rng.uniform(_SMALLEST, 1)))
        x = _KINDS[number % len(_KINDS)](rng, own)
        if rng.random() < _GREY:
            x = np.repeat(x.mean(-1, keepdims=True), 3, axis=-1)
        if rng.random() < _INVERTED:
            x = 1 - x
        if rng.random() < _HARD:
            x = 0.5 + rng.uniform(1, 4) * (x - 0.5)
        pictures.append(Image.fromarray((np.clip(x, 0, 1) * 255).astype(np.uint8)))
    return pictures


def _canvas(side: int, colour: Any) -> tuple[Any, Any]:
    from PIL import Image, ImageDraw

    picture = Image.new("RGB", (side, side), _bytes(colour))
    return picture, ImageDraw.Draw(picture)


def _bytes(colour: Any) -> tuple[int, ...]:
    return tuple(int(255 * c) for c in colour)


def _colour(rng: np.random.Generator, pure: bool) -> NDArray[np.float64]:
    x = rng.random(3)
    return np.round(x) if pure else x


def _pixels(picture: Any) -> Pixels:
    return np.asarray(picture, np.float64) / 255


def _dead_leaves(rng: np.random.Generator, side: int) -> Pixels:
    """Discs and boxes over each other; the density of their radii falls with the cube."""
    picture, draw = _canvas(side, rng.random(3))
    shades = 0.7 * rng.random((8, 3)) + 0.15
    for radius in 3.0 * side / _UNIT / np.sqrt(rng.uniform(0.003, 1.0, 400)):
        x, y = rng.uniform(0, side, 2)
        colour = _bytes(np.clip(shades[rng.integers(8)] + 0.15 * rng.normal(size=3), 0, 1))
        shape = draw.ellipse if rng.random() < 0.7 else draw.rectangle
        shape((x - radius, y - radius, x + radius, y + radius), fill=colour)
    return _noisy(_pixels(picture), rng, 0.03)


def _strokes(rng: np.random.Generator, side: int) -> Pixels:
    """Curved dark lines on light paper."""
    picture, draw = _canvas(side, np.full(3, min(1.0, rng.uniform(0.85, 1.15))))
    for _ in range(rng.integers(1, 40)):
        turn, at = rng.uniform(0, 2 * np.pi), rng.uniform(0, side, 2)
        bend, points = rng.normal(0, 0.3), [tuple(at)]
        for _ in range(rng.integers(2, 25)):
            turn += bend + rng.normal(0, 0.15)
            at = at + 6 * side / _UNIT * np.array([np.cos(turn), np.sin(turn)])
            points.append(tuple(at))
        draw.line(points, fill=_bytes(np.full(3, rng.uniform(0, 0.4))), width=int(rng.integers(1, 4)))
    return _pixels(picture)


def _shapes(rng: np.random.Generator, side: int) -> Pixels:
    """A few filled polygons with outlines on a flat ground, as in a cartoon."""
    pure = rng.random() < 0.2  # saturated colours
    picture, draw = _canvas(side, np.ones(3) if rng.random() < 0.4 else _colour(rng, pure))
    for _ in range(rng.integers(1, 12)):
        corners = int(rng.integers(3, 9))
        angles = np.sort(rng.uniform(0, 2 * np.pi, corners))
        radii = rng.uniform(5, 50) * side / _UNIT * rng.uniform(0.5, 1, corners)
        centre = rng.uniform(0, side, 2)
        points = [(centre[0] + r * np.cos(a), centre[1] + r * np.sin(a)) for r, a in zip(radii, angles, strict=True)]
        outline = (0, 0, 0) if rng.random() < 0.6 else None
        draw.polygon(points, fill=_bytes(_colour(rng, pure)), outline=outline, width=int(rng.integers(1, 4)))
    return _pixels(picture)


def _text(rng: np.random.Generator, side: int) -> Pixels:
    """Lines of random letters."""
    from PIL import ImageFont

    ground = rng.uniform(0.6, 1.0)
    picture, draw = _canvas(side, np.full(3, ground))
    font = ImageFont.load_default()
    for y in range(2, side, int(rng.integers(11, 24))):
        letters = "".join(chr(int(c)) for c in rng.integers(65, 123, rng.integers(1, 24)))
        draw.text((float(rng.uniform(0, 30)), y), letters, fill=_bytes(rng.uniform(0, 0.5, 3)), font=font)
    return _pixels(picture)


def _spectrum(rng: np.random.Generator, side: int) -> Pixels:
    """Noise whose amplitudes fall with the frequency to the power of 0.6 to 1.8, as of clouds and textures."""
    frequency = np.hypot(*np.meshgrid(np.fft.fftfreq(side), np.fft.rfftfreq(side), indexing="ij"))
    frequency[0, 0] = 1.0
    fall = frequency[..., None] ** -rng.uniform(0.6, 1.8)
    waves = rng.normal(size=(*frequency.shape, 3)) + 1j * rng.normal(size=(*frequency.shape, 3))
    x = np.fft.irfft2(waves * fall, (side, side), axes=(0, 1))
    mixed = x @ (np.full((3, 3), 0.3) + 0.3 * rng.random((3, 3)))
    return np.asarray(0.5 + rng.uniform(0.05, 0.3) * mixed / mixed.std(), np.float64)


def _scan(rng: np.random.Generator, side: int) -> Pixels:
    """Grey bodies inside each other on black, with noise inside."""
    rows, columns = np.mgrid[:side, :side] / side - 0.5
    x = np.zeros((side, side))
    width, height, tilt = rng.uniform(0.2, 0.48), rng.uniform(0.2, 0.48), rng.uniform(0, np.pi)
    for depth in range(int(rng.integers(1, 12))):
        shrink = 1.0 if depth == 0 else rng.uniform(0.05, 0.9)
        away = np.zeros(2) if depth == 0 else rng.uniform(-0.2, 0.2, 2)
        u = (columns - away[0]) * np.cos(tilt) + (rows - away[1]) * np.sin(tilt)
        v = (rows - away[1]) * np.cos(tilt) - (columns - away[0]) * np.sin(tilt)
        inside = (u / (width * shrink)) ** 2 + (v / (height * shrink)) ** 2 < 1
        x[inside & (x > 0) | inside & (depth == 0)] = rng.uniform(0.05, 1)
    return _noisy(np.repeat(x[..., None], 3, axis=-1), rng, 0.05) * (x[..., None] > 0)


def _dots(rng: np.random.Generator, side: int) -> Pixels:
    """Waves of grey, or of each channel, as a grid of dots whose size follows them, as in print."""
    rows, columns = np.mgrid[:side, :side].astype(float)
    turn, period = rng.uniform(0, np.pi), rng.uniform(3, 12)
    u, v = rows * np.cos(turn) + columns * np.sin(turn), columns * np.cos(turn) - rows * np.sin(turn)
    grid = 0.5 + 0.25 * (np.cos(2 * np.pi * u / period) + np.cos(2 * np.pi * v / period))
    tones = [
        0.5 + 0.5 * np.sin(2 * np.pi * (a * rows + b * columns) / side + c)
        for a, b, c in rng.uniform(-2, 2, (1 if rng.random() < 0.5 else 3, 3))
    ]
    x = np.stack([tone > grid for tone in tones], -1).astype(np.float64)
    return np.broadcast_to(x, (side, side, 3)).copy()


def _squares(rng: np.random.Generator, side: int) -> Pixels:
    """Noise in squares of 1 to 32 pixels, weak or strong, over a flat ground."""
    size = 2 ** int(rng.integers(6))
    n = -(-side // size)
    x = rng.random((n, n, 3))
    if rng.random() < 0.4:
        x = np.round(x)
    x = np.repeat(np.repeat(x, size, 0), size, 1)[:side, :side]
    share = 1.0 if rng.random() < 0.5 else 10 ** rng.uniform(-2, 0)
    ground = _colour(rng, pure=rng.random() < 0.5)
    return np.asarray((1 - share) * ground + share * x, np.float64)


def _flat(rng: np.random.Generator, side: int) -> Pixels:
    """One colour, mostly a saturated one, or two."""
    x = np.broadcast_to(_colour(rng, rng.random() < 0.8), (side, side, 3)).copy()
    if rng.random() < 0.4:
        x[:, : rng.integers(side)] = _colour(rng, rng.random() < 0.8)
    return x


def _noisy(x: Pixels, rng: np.random.Generator, most: float) -> Pixels:
    return x + rng.uniform(0, most) * rng.normal(size=x.shape)


_KINDS: tuple[Callable[[np.random.Generator, int], Pixels], ...] = (
    _dead_leaves,
    _strokes,
    _shapes,
    _text,
    _spectrum,
    _scan,
    _dots,
    _squares,
    _flat,
)
