"""The split is an orthogonal decomposition, whatever the dtype, and its angles are exact."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import TypeCheckError

from tl_tangent.errors import TangentKeyError, TangentValueError
from tl_tangent.geometry import SubspaceSet, TangentSubspace

D, RANK, HEADS = 24, 4, 3
REFUSED = (TangentValueError, TypeCheckError)  # the second where the shape checker runs


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make(*lead: int, rank: int = RANK, seed: int = 0, **labels: object) -> TangentSubspace:
    return TangentSubspace(
        randn(*lead, D, rank, seed=seed),
        randn(*lead, D, seed=seed + 1),
        orthonormalize=True,
        **labels,
    )


@pytest.fixture(params=[(), (HEADS,)], ids=["one basis", "one a head"])
def lead(request: pytest.FixtureRequest) -> tuple[int, ...]:
    return request.param


class TestSplit:
    def test_parts_add_up_to_the_centred_activation(self, lead: tuple[int, ...]) -> None:
        subspace, x = make(*lead), randn(5, 7, *lead, D, seed=3)
        tangent, normal = subspace.split(x)
        torch.testing.assert_close(subspace.mean + tangent + normal, x)

    def test_projections_are_idempotent_and_exclude_each_other(self, lead: tuple[int, ...]) -> None:
        subspace, x = make(*lead), randn(50, *lead, D, seed=3)
        tangent, normal = subspace.split(x)
        torch.testing.assert_close(subspace.tangent(tangent + subspace.mean), tangent)
        torch.testing.assert_close(subspace.normal(normal + subspace.mean), normal)
        assert subspace.tangent(normal + subspace.mean).abs().max() < 1e-12

    def test_energies_add(self, lead: tuple[int, ...]) -> None:
        subspace, x = make(*lead), randn(50, *lead, D, seed=3)
        tangent, normal = subspace.split(x)
        total = (x - subspace.mean).square().sum(-1)
        torch.testing.assert_close(tangent.square().sum(-1) + normal.square().sum(-1), total)
        torch.testing.assert_close(
            subspace.coordinates(x).square().sum(-1), tangent.square().sum(-1)
        )

    def test_each_head_is_split_by_its_own_basis(self) -> None:
        subspace, x = make(HEADS), randn(6, HEADS, D, seed=3)
        for head in range(HEADS):
            one = subspace.head(head)
            torch.testing.assert_close(subspace.tangent(x)[:, head], one.tangent(x[:, head]))

    @given(seed=st.integers(0, 2**20), rank=st.integers(1, D))
    @settings(max_examples=20, deadline=None)
    def test_tangent_part_does_not_depend_on_the_basis_of_the_span(
        self, seed: int, rank: int
    ) -> None:
        subspace, x = make(rank=rank, seed=seed), randn(5, D, seed=seed)
        turn = torch.linalg.qr(randn(rank, rank, seed=seed + 7))[0]
        turned = subspace.replace(basis=subspace.basis @ turn)
        torch.testing.assert_close(turned.tangent(x), subspace.tangent(x))

    def test_rotating_everything_rotates_the_parts(self) -> None:
        subspace, x = make(), randn(9, D, seed=3)
        turn = torch.linalg.qr(randn(D, D, seed=5))[0]
        turned = TangentSubspace(turn @ subspace.basis, turn @ subspace.mean)
        torch.testing.assert_close(turned.normal(x @ turn.T), subspace.normal(x) @ turn.T)


class TestPrecision:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    def test_half_precision_is_split_in_float32(self, dtype: torch.dtype) -> None:
        subspace = make(rank=8).replace(mean=torch.zeros(D))
        x = (300 * randn(40, D, seed=3)).to(dtype)
        tangent, normal = subspace.split(x)
        assert tangent.dtype == normal.dtype == subspace.coordinates(x).dtype == dtype
        exact = subspace.tangent(x.double())
        step = torch.finfo(dtype).eps * exact.abs()
        assert bool(((tangent.double() - exact).abs() <= step + 1e-4).all())

    def test_autocast_does_not_lower_the_precision(self) -> None:
        subspace, x = make(), randn(40, D, seed=3).float()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside = subspace.tangent(x)
        assert torch.equal(inside, subspace.tangent(x))

    def test_basis_keeps_float64_and_lifts_half(self) -> None:
        assert make().basis.dtype == torch.float64
        eye = torch.eye(D, RANK)
        assert TangentSubspace(eye.bfloat16()).basis.dtype == torch.float32

    def test_made_under_inference_mode_it_serves_autograd(self) -> None:
        with torch.inference_mode():
            subspace = make()
            subspace.tangent(randn(2, D).float())  # fills the cache of casts
        assert not subspace.basis.is_inference() and not subspace.mean.is_inference()
        x = randn(3, D).float().requires_grad_()
        weight = randn(3, D, seed=4).float()
        (subspace.tangent(x) * weight).sum().backward()
        expected = weight @ subspace.basis.float() @ subspace.basis.float().T
        torch.testing.assert_close(x.grad, expected)

    def test_the_given_tensor_can_change_afterwards(self) -> None:
        basis = torch.eye(D, RANK)
        subspace = TangentSubspace(basis)
        basis.zero_()
        assert torch.equal(subspace.basis, torch.eye(D, RANK))


class TestRefusals:
    @pytest.mark.parametrize(
        ("basis", "says"),
        [
            (torch.eye(D, RANK) * 1.01, "orthonormal"),
            (torch.full((D, RANK), math.nan), "NaN"),
            (torch.eye(RANK, D), "transposed"),
            (torch.eye(D)[0], "shape"),
            (torch.eye(D, RANK, dtype=torch.int64), "floating"),
        ],
    )
    def test_bad_basis(self, basis: torch.Tensor, says: str) -> None:
        with pytest.raises(REFUSED, match=rf"(?s){says}|basis"):
            TangentSubspace(basis)

    def test_dependent_columns_are_not_orthonormalised(self) -> None:
        basis = randn(D, RANK)
        basis[:, 3] = basis[:, 0] + basis[:, 1]
        with pytest.raises(TangentValueError, match="span only 3"):
            TangentSubspace(basis, orthonormalize=True)

    def test_mean_of_another_width(self) -> None:
        with pytest.raises(REFUSED):
            TangentSubspace(torch.eye(D, RANK), torch.zeros(D + 1))

    def test_activations_of_another_width_or_dtype(self) -> None:
        with pytest.raises(TangentValueError, match=rf"\[..., {D}\], got \[2, {D + 1}\]"):
            make().tangent(torch.zeros(2, D + 1))
        with pytest.raises(TangentValueError, match=rf"\[..., {HEADS}, {D}\]"):
            make(HEADS).tangent(torch.zeros(2, D))
        with pytest.raises(REFUSED):
            make().tangent(torch.zeros(2, D, dtype=torch.int64))

    def test_wrong_head(self) -> None:
        with pytest.raises(TangentKeyError, match="heads are 0 to 2"):
            make(HEADS).head(HEADS)
        with pytest.raises(TangentValueError, match="one basis for all heads"):
            make().head(0)

    def test_it_is_frozen(self) -> None:
        with pytest.raises(AttributeError):
            make().rank = 3  # type: ignore[misc]
        with pytest.raises(TypeError):
            make(metadata={"a": 1}).metadata["a"] = 2  # type: ignore[index]


class TestAngles:
    @pytest.mark.parametrize("angle", [0.0, 1e-12, 1e-6, 1e-3, 0.3, 0.7853, 0.79, 1.1, math.pi / 2])
    def test_known_angle_to_relative_precision(self, angle: float) -> None:
        """The span of e1, e2 against the span of e1 turned and e2 turned further."""
        first = torch.eye(D, 2, dtype=torch.float64)
        second = torch.zeros(D, 2, dtype=torch.float64)
        for column, turn in enumerate((angle, min(2 * angle, math.pi / 2))):
            second[column, column] = math.cos(turn)
            second[column + 5, column] = math.sin(turn)
        found = TangentSubspace(first).principal_angles(TangentSubspace(second))
        expected = torch.tensor([angle, min(2 * angle, math.pi / 2)], dtype=torch.float64)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-15)

    def test_two_angles_by_hand(self) -> None:
        """Angles (.3, 1.1): geodesic 1.140175425, mean squared cosine .559208624."""
        first = TangentSubspace(torch.eye(5, 2, dtype=torch.float64))
        second = torch.zeros(5, 2, dtype=torch.float64)
        second[0, 0], second[2, 0] = math.cos(0.3), math.sin(0.3)
        second[1, 1], second[3, 1] = math.cos(1.1), math.sin(1.1)
        other = TangentSubspace(second)
        assert float(first.principal_angles(other).norm()) == pytest.approx(1.140175425, abs=1e-9)
        assert float(first.overlap(other)) == pytest.approx(0.559208624, abs=1e-9)

    def test_angles_are_symmetric_and_free_of_the_basis(self, lead: tuple[int, ...]) -> None:
        first, second = make(*lead), make(*lead, rank=6, seed=9)
        angles = first.principal_angles(second)
        assert angles.shape == (*lead, RANK)
        assert bool((angles.diff(dim=-1) >= 0).all())
        torch.testing.assert_close(second.principal_angles(first), angles)
        torch.testing.assert_close(first.overlap(second), angles.cos().square().mean(-1))

    def test_one_basis_compares_with_every_head(self) -> None:
        one, many = make(seed=9), make(HEADS)
        for head in range(HEADS):
            expected = one.principal_angles(many.head(head))
            torch.testing.assert_close(one.principal_angles(many)[head], expected)

    def test_other_widths_do_not_compare(self) -> None:
        with pytest.raises(TangentValueError, match="shapes differ"):
            make().overlap(TangentSubspace(torch.eye(D + 1, RANK)))
        with pytest.raises(TangentValueError, match="shapes differ"):
            make(HEADS).overlap(make(HEADS + 1))


class TestRandomNormals:
    def test_orthogonal_to_float_precision_and_orthonormal(self, lead: tuple[int, ...]) -> None:
        subspace = make(*lead)
        for dtype, bound in ((torch.float32, 1e-6), (torch.float64, 1e-14)):
            placed = subspace.replace(basis=subspace.basis.to(dtype))
            for normal in placed.random_normals(3, seed=1):
                assert (placed.basis.mT @ normal.basis).abs().max() < bound
                identity = torch.eye(RANK, dtype=dtype).expand(*lead, RANK, RANK)
                torch.testing.assert_close(normal.basis.mT @ normal.basis, identity)
                torch.testing.assert_close(normal.mean, placed.mean)

    def test_seeded_and_the_first_draws_do_not_depend_on_their_number(self) -> None:
        few, many = make().random_normals(2, seed=5), make().random_normals(4, seed=5)
        assert all(torch.equal(a.basis, b.basis) for a, b in zip(few, many, strict=False))
        assert not torch.equal(many[0].basis, many[1].basis)
        assert not torch.equal(few[0].basis, make().random_normals(1, seed=6)[0].basis)

    def test_haar_in_the_complement(self) -> None:
        """The mean projector is rank / (d - rank) times the one on the complement."""
        subspace = make()
        draws = torch.stack([n.basis @ n.basis.T for n in subspace.random_normals(300, seed=0)])
        complement = torch.eye(D, dtype=torch.float64) - subspace.basis @ subspace.basis.T
        expected = complement * RANK / (D - RANK)
        assert (draws.mean(0) - expected).abs().max() < 0.06

    def test_refused_without_room(self) -> None:
        with pytest.raises(TangentValueError, match=r"2 \* rank <= d.*rank 12 or less"):
            make(rank=13).random_normals(1, seed=0)
        assert make(rank=12).random_normals(1, seed=0)[0].rank == 12


class TestValue:
    def test_truncate_keeps_leading_directions_and_their_share(self) -> None:
        spectrum = torch.tensor([6.0, 3.0, 2.0, 1.0, 4.0, 4.0])
        subspace = make(spectrum=spectrum, explained=12 / 20)
        two = subspace.truncate(2)
        assert torch.equal(two.basis, subspace.basis[:, :2])
        assert two.explained == pytest.approx(9 / 20)
        with pytest.raises(TangentValueError, match="from 1 to 4"):
            subspace.truncate(5)

    def test_shares_of_heads(self) -> None:
        spectrum = torch.tensor([[3.0, 1, 0, 0], [1, 1, 1, 1], [4, 0, 0, 0]])
        subspace = make(HEADS, spectrum=spectrum, explained=[1.0, 0.5, 1.0])
        assert subspace.explained == pytest.approx(2.5 / 3)
        assert subspace.head(1).explained == 0.5
        assert subspace.truncate(1).head_explained == pytest.approx((0.75, 0.125, 1.0))

    def test_canonical_sign(self) -> None:
        basis = randn(D, RANK)
        plus = TangentSubspace(basis, orthonormalize=True).basis
        minus = TangentSubspace(-basis, orthonormalize=True).basis
        torch.testing.assert_close(plus, minus)
        assert bool((plus.gather(0, plus.abs().argmax(0, keepdim=True)) > 0).all())

    def test_pickle_and_deepcopy(self) -> None:
        subspace = make(site="blocks.0.hook_resid_post", metadata={"a": [1]})
        subspace.tangent(torch.zeros(1, D))
        for copied in (pickle.loads(pickle.dumps(subspace)), copy.deepcopy(subspace)):
            assert torch.equal(copied.basis, subspace.basis) and copied.site == subspace.site
            copied.tangent(torch.zeros(1, D))

    def test_it_shows_itself(self) -> None:
        subspace = make(site="blocks.0.<hook>", method="pca", explained=0.25)
        assert "rank=4" in repr(subspace) and "explained=0.25" in repr(subspace)
        assert "blocks.0.&lt;hook&gt;" in subspace._repr_html_()


class TestSubspaceSet:
    def test_maps_sites_in_order(self) -> None:
        sites = ["blocks.1.hook_resid_post", "blocks.0.hook_resid_post", "hook_embed"]
        subspaces = SubspaceSet(make(site=site) for site in sites)
        assert list(subspaces) == sites and len(subspaces) == 3
        assert subspaces["hook_embed"].site == "hook_embed"
        assert SubspaceSet({"hook_embed": make()})["hook_embed"].site == "hook_embed"

    def test_missing_site_names_the_nearest(self) -> None:
        subspaces = SubspaceSet({"blocks.0.hook_resid_post": make()})
        with pytest.raises(TangentKeyError, match=r"nearest here: blocks\.0\.hook_resid_post"):
            subspaces["blocks.0.hook_resid_pots"]
        assert subspaces.get("blocks.9.hook_resid_post") is None

    def test_refuses_what_has_no_single_name(self) -> None:
        with pytest.raises(TangentValueError, match="has no site"):
            SubspaceSet([make()])
        with pytest.raises(TangentValueError, match="two subspaces"):
            SubspaceSet([make(site="a"), make(site="a")])
        with pytest.raises(AttributeError, match="frozen"):
            SubspaceSet().other = 1  # type: ignore[attr-defined]

    def test_controls_differ_by_site_and_repeat_by_seed(self) -> None:
        subspaces = SubspaceSet({"a": make(), "b": make()})
        drawn, again = subspaces.random_normals(2, seed=3), subspaces.random_normals(2, seed=3)
        assert not torch.equal(drawn[0]["a"].basis, drawn[0]["b"].basis)
        assert torch.equal(drawn[1]["b"].basis, again[1]["b"].basis)
        assert drawn[0].truncate(2)["a"].rank == 2

    def test_dataframe_is_tidy(self) -> None:
        table = SubspaceSet(
            {
                "blocks.11.attn.hook_z": make(HEADS, explained=[0.2, 0.4, 0.6]),
                "hook_embed": make(n_tokens=7, method="pca"),
            }
        ).to_dataframe()
        assert list(table["site"]) == ["blocks.11.attn.hook_z", "hook_embed"]
        assert table["layer"][0] == 11 and math.isnan(table["layer"][1])
        assert table["explained"][0] == pytest.approx(0.4)
        assert {"d", "rank", "method", "n_tokens", "positions"} <= set(table)

    def test_pickle_and_display(self) -> None:
        subspaces = SubspaceSet({"a": make()})
        assert torch.equal(pickle.loads(pickle.dumps(subspaces))["a"].basis, subspaces["a"].basis)
        assert copy.deepcopy(subspaces)["a"] is subspaces["a"]
        assert "<td>a</td>" in subspaces._repr_html_() and "1 site" in repr(subspaces)
