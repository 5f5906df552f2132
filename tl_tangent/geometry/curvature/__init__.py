"""Curvature around a centre: what it predicts, and what a cloud of points shows of it."""

from tl_tangent.geometry.curvature.attenuation import (
    AttenuationCurve,
    attenuation_curve,
    sampled_attenuation,
)
from tl_tangent.geometry.curvature.chord import (
    arc_from_chord,
    chord_from_arc,
    circle_arc,
    circle_chord,
    sphere_parts,
)
from tl_tangent.geometry.curvature.directions import (
    DirectionTensor,
    direction_response,
    direction_tensor,
    predicted_response,
    predicted_tensor,
    projected_directions,
)
from tl_tangent.geometry.curvature.graph_moments import GraphMoments, graph_moments
from tl_tangent.geometry.curvature.harmonics import (
    Harmonics,
    direction_harmonics,
    predicted_harmonics,
)
from tl_tangent.geometry.curvature.local import Direction, Estimate, LocalParts, local_parts
from tl_tangent.geometry.curvature.moment_ratio import eta_of_density, eta_of_points
from tl_tangent.geometry.curvature.normal_slope import NormalSlope, normal_slope
from tl_tangent.geometry.curvature.profile import (
    direction_density,
    direction_profile,
    extrinsic_volume,
    profile_mean,
    profile_variance,
    surface_profile,
)
from tl_tangent.geometry.curvature.quadratic_fit import SecondFormFit, fit_second_form
from tl_tangent.geometry.curvature.ratio_slope import RatioSlope, ratio_slope
from tl_tangent.geometry.curvature.second_form import (
    mean_curvature,
    normal_curvature,
    ricci,
    scalar_curvature,
    square_norm,
)
from tl_tangent.geometry.curvature.visibility import profile_range, visibility_index

__all__ = [
    "AttenuationCurve",
    "Direction",
    "DirectionTensor",
    "Estimate",
    "GraphMoments",
    "Harmonics",
    "LocalParts",
    "NormalSlope",
    "RatioSlope",
    "SecondFormFit",
    "arc_from_chord",
    "attenuation_curve",
    "chord_from_arc",
    "circle_arc",
    "circle_chord",
    "direction_density",
    "direction_harmonics",
    "direction_profile",
    "direction_response",
    "direction_tensor",
    "eta_of_density",
    "eta_of_points",
    "extrinsic_volume",
    "fit_second_form",
    "graph_moments",
    "local_parts",
    "mean_curvature",
    "normal_curvature",
    "normal_slope",
    "predicted_harmonics",
    "predicted_response",
    "predicted_tensor",
    "profile_mean",
    "profile_range",
    "profile_variance",
    "projected_directions",
    "ratio_slope",
    "ricci",
    "sampled_attenuation",
    "scalar_curvature",
    "sphere_parts",
    "square_norm",
    "surface_profile",
    "visibility_index",
]
