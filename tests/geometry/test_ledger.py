"""Energies of both parts, write by write, against dense projectors and a stream in closed form."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tl_tangent.geometry.ledger import Frame, Position

BASES, D, RANK, ROWS = 3, 12, 4, 7
TANGENT, NORMAL = 0, 1


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def frame(seed: int = 0, *, rank: int = RANK, mean: bool = True) -> Frame:
    bases = torch.linalg.qr(gaussian(BASES, D, rank, seed=seed))[0]
    return Frame(bases, gaussian(D, seed=seed + 100) if mean else torch.zeros(D).double())


@dataclass
class Dense:
    """Both parts ``[part, basis, row, d]`` of vectors, by d x d projectors written out."""

    parts: Tensor

    @classmethod
    def of(cls, frame: Frame, vectors: Tensor) -> Dense:
        projectors = frame.bases @ frame.bases.mT
        return cls(torch.stack([vectors @ projectors, vectors @ (torch.eye(D) - projectors)]))

    def inner(self, other: Dense) -> Tensor:
        return (self.parts * other.parts).sum(-1)


def same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)


# Adding -------------------------------------------------------------------------------------------


def test_a_position_has_the_energies_of_both_projections():
    here, x = frame(), gaussian(ROWS, D, seed=1)
    parts = Dense.of(here, x - here.mean)
    at = Position.of(here, x)
    same(at.energy(), parts.inner(parts))
    same(at.energy().sum(0), (x - here.mean).square().sum(-1).expand(BASES, -1))


def test_a_write_enters_with_its_energies_and_its_products_with_what_was_there():
    here, x, write = frame(), gaussian(ROWS, D, seed=1), gaussian(ROWS, D, seed=2)
    before, added = Dense.of(here, x - here.mean), Dense.of(here, write)
    entry, at = Position.of(here, x).add(write)
    same(entry.energy, added.inner(added))
    same(entry.with_carried, added.inner(before))
    after = Position.of(here, x + write)
    same(at.centred, after.centred)
    same(at.coordinates, after.coordinates)


def test_energies_telescope_over_writes():
    here, at = frame(), Position.of(frame(), gaussian(ROWS, D, seed=1))
    energy = at.energy()
    for seed in range(2, 8):
        entry, at = at.add(gaussian(ROWS, D, seed=seed))
        energy = energy + entry.energy + 2 * entry.with_carried
        same(at.energy(), energy)
    total = gaussian(ROWS, D, seed=1) + sum(gaussian(ROWS, D, seed=s) for s in range(2, 8))
    same(energy, Position.of(here, total).energy())


@pytest.mark.parametrize("part", [TANGENT, NORMAL])
def test_a_write_inside_one_part_leaves_the_other_as_it_was(part):
    here = frame()
    alone = Frame(here.bases[:1], here.mean)
    write = Dense.of(alone, gaussian(ROWS, D, seed=2)).parts[part, 0]
    before = Position.of(alone, gaussian(ROWS, D, seed=1))
    entry, after = before.add(write)
    other = 1 - part
    same(after.energy()[other], before.energy()[other])
    same(entry.energy[other], torch.zeros(1, ROWS).double())
    same(entry.with_carried[other], torch.zeros(1, ROWS).double())
    assert float((after.energy() - before.energy())[part].abs().min()) > 1e-3


@pytest.mark.parametrize("a", [0.3, -0.2])
def test_layers_that_write_a_times_the_tangent_part_reinforce_it_and_copy_the_rest(a):
    """x <- x + a P_T x: after L layers v is (1 + a)^L times as large, n is what it was."""
    here = frame(mean=False)
    projector = here.bases[0] @ here.bases[0].T
    x = gaussian(ROWS, D, seed=1)
    start = at = Position.of(here, x)
    layers = 6
    for _ in range(layers):
        write = a * x @ projector
        entry, at = at.add(write)
        same(entry.energy[NORMAL, 0], torch.zeros(ROWS).double())
        x = x + write
    grown = torch.full((ROWS,), (1 + a) ** layers, dtype=x.dtype)
    gain = (at.energy() / start.energy()).sqrt()[:, 0]
    same(gain[TANGENT], grown)
    same(gain[NORMAL], torch.ones(ROWS).double())
    kept = at.with_part(start)[:, 0] / start.energy()[:, 0]
    same(kept[TANGENT], grown)
    same(kept[NORMAL], torch.ones(ROWS).double())


# Beside a massive part ----------------------------------------------------------------------------


def massive(seed: int, size: float = 1e4) -> tuple[Frame, Tensor]:
    """A frame in float32, and rows with 1e4 along its first direction and numbers near 1 else."""
    bases = torch.linalg.qr(gaussian(BASES, D, RANK, seed=seed))[0]
    bases[:, :, 0] = bases[0, :, 0]  # all bases share it
    bases = torch.linalg.qr(bases)[0].float()
    here = Frame.exact(bases, gaussian(D, seed=seed + 100).float())
    x = gaussian(ROWS, D, seed=seed + 1) + size * bases[0, :, 0].double()
    return Frame(bases.double(), here.mean), x.float()


def test_an_exact_frame_has_the_same_subspaces_orthonormal_in_float64():
    single, _ = massive(0)
    exact = Frame.exact(single.bases.float(), single.mean.float())
    eye = torch.eye(RANK).double()
    assert float((single.bases.mT @ single.bases - eye).abs().max()) > 1e-9
    same(exact.bases.mT @ exact.bases, eye.expand(BASES, -1, -1))
    inside = exact.bases @ (exact.bases.mT @ single.bases)
    torch.testing.assert_close(inside, single.bases, atol=1e-14, rtol=0)
    assert exact.bases.dtype == exact.mean.dtype == torch.float64


def test_normal_parts_beside_a_massive_tangent_part():
    """x - Q Q^T x written out loses nothing; neither does the difference of squares."""
    single, x = massive(0)
    exact = Frame.exact(single.bases.float(), single.mean.float())
    write = massive(0, size=1e4)[1] + gaussian(ROWS, D, seed=7).float()
    parts, added = (
        (vectors @ single.bases) @ single.bases.mT
        for vectors in (x.double() - exact.mean, write.double())
    )
    rest = x.double() - exact.mean - parts, write.double() - added
    close = {"rtol": 1e-6, "atol": 0}
    at = Position.of(exact, x)
    entry, after = at.add(write)
    torch.testing.assert_close(at.energy()[NORMAL], rest[0].square().sum(-1), **close)
    torch.testing.assert_close(entry.energy[NORMAL], rest[1].square().sum(-1), **close)
    inner = (rest[0] * rest[1]).sum(-1)
    torch.testing.assert_close(entry.with_carried[NORMAL], inner, rtol=1e-6, atol=1e-5)
    before = (rest[0] * (rest[0] + rest[1])).sum(-1)
    torch.testing.assert_close(at.with_part(after)[NORMAL], before, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(after.with_part(at)[NORMAL], before, rtol=1e-6, atol=1e-5)


def test_energies_are_never_negative():
    """Of vectors that lie in the subspace."""
    here = frame(mean=False)
    inside = 1e6 * gaussian(ROWS, RANK, seed=1) @ here.bases[0].T
    alone = Frame(here.bases[:1], here.mean)
    entry, at = Position.of(alone, inside).add(inside)
    for energy in (at.energy(), entry.energy):
        assert float(energy.min()) >= 0
        assert float((energy[NORMAL] / energy[TANGENT]).max()) < 1e-14


# Moving -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [RANK, 2])
def test_a_move_is_two_writes_to_both_parts(rank):
    """First the subspace turns around the old mean, then the mean moves in the new subspace."""
    old, new, x = frame(0), frame(1, rank=rank), gaussian(ROWS, D, seed=2)
    y, delta = x - old.mean, (new.mean - old.mean).expand(ROWS, D)
    before, turned = Dense.of(old, y), Dense.of(new, y)
    change, shift = Dense(turned.parts - before.parts), Dense.of(new, -delta)
    entries, at = Position.of(old, x).move(new)
    assert list(entries) == ["subspace", "mean"]
    same(entries["subspace"].energy, change.inner(change))
    same(entries["subspace"].with_carried, change.inner(before))
    same(entries["mean"].energy, shift.inner(shift))
    same(entries["mean"].with_carried, shift.inner(turned))
    expected = Position.of(new, x)
    same(at.centred, expected.centred)
    same(at.coordinates, expected.coordinates)


def test_energies_telescope_over_moves():
    old, new, x = frame(0), frame(1), gaussian(ROWS, D, seed=2)
    entries, at = Position.of(old, x).move(new)
    added = sum(entry.energy + 2 * entry.with_carried for entry in entries.values())
    same(at.energy(), Position.of(old, x).energy() + added)
    same(at.energy(), Position.of(new, x).energy())


def test_what_the_tangent_part_gains_by_turning_the_normal_part_loses():
    old, x = frame(0), gaussian(ROWS, D, seed=2)
    new = Frame(frame(1).bases, old.mean)
    entries, _ = Position.of(old, x).move(new)
    subspace, mean = entries["subspace"], entries["mean"]
    same(subspace.energy[TANGENT], subspace.energy[NORMAL])
    assert float(subspace.energy.min()) > 1e-3
    same(mean.energy, torch.zeros(2, BASES, ROWS).double())
    change = (subspace.energy + 2 * subspace.with_carried).sum(0)  # ||y||^2 stays
    same(change, torch.zeros(BASES, ROWS).double())


def test_another_basis_of_the_same_subspace_changes_nothing():
    old, x = frame(0), gaussian(ROWS, D, seed=2)
    turn = torch.linalg.qr(gaussian(RANK, RANK, seed=3))[0]
    entries, at = Position.of(old, x).move(Frame(old.bases @ turn, old.mean))
    for entry in entries.values():
        same(entry.energy, torch.zeros(2, BASES, ROWS).double())
        same(entry.with_carried, torch.zeros(2, BASES, ROWS).double())
    same(at.energy(), Position.of(old, x).energy())


# Two positions ------------------------------------------------------------------------------------


@pytest.mark.parametrize("moved, rank", [(False, RANK), (True, RANK), (True, 2)])
def test_products_of_two_positions_part_by_part(moved, rank):
    here = frame(0)
    there = frame(1, rank=rank) if moved else here
    x, y = gaussian(ROWS, D, seed=2), gaussian(ROWS, D, seed=3)
    expected = Dense.of(here, x - here.mean).inner(Dense.of(there, y - there.mean))
    same(Position.of(here, x).with_part(Position.of(there, y)), expected)
    same(Position.of(there, y).with_part(Position.of(here, x)), expected)


def test_the_product_with_itself_is_the_energy():
    at = Position.of(frame(), gaussian(ROWS, D, seed=2))
    same(at.with_part(at), at.energy())


def test_coordinates_are_those_of_each_basis_and_take_no_mean_out():
    here, x = frame(), gaussian(ROWS, D, seed=1)
    found = here.coordinates(x)
    assert found.shape == (BASES, ROWS, RANK)
    for basis, coordinates in zip(here.bases, found, strict=True):
        same(coordinates, x @ basis)
