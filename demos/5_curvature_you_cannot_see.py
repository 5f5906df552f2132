# %% [markdown]
# # Curvature that can't be seen
#
# `pip install .` in a clone of tl_tangent.
#
# When the points of a curved manifold draw together around one of them, the manifold looks flat to
# any statistic of the sample. On manifolds whose curvature is known this can be watched.

# %%
import tl_tangent as tt
from tl_tangent.geometry.curvature import fit_second_form, predicted_harmonics, sampled_attenuation
from tl_tangent.geometry.manifolds import Cylinder, Gaussian, Paraboloid, Sphere, sample

# %% [markdown]
# ## One knob, all measures
#
# The same cylinder at six concentrations: the cloud, the law of its directions, IsoScore and the
# share of a linear map's gradient that is tangent.

# %%
simulation = tt.simulate(Cylinder(radius=1.0), Gaussian(0.4), n=20_000, d=16)
print(simulation.headline())
simulation.plot()

# %% [markdown]
# ## The law of the directions
#
# To first order the directions of a cylinder are uneven in proportion to the moment ratio eta, in one
# way for geodesic directions and in another for projected ones; those of a sphere are even always.

# %%
for surface in (Cylinder(radius=1.0), Sphere(dim=2, radius=1.0)):
    for direction in ("geodesic", "projected"):
        told = predicted_harmonics(surface.second_fundamental_form, 0.16, direction=direction)
        print(f"{type(surface).__name__}, {direction}: {told.cosine.tolist()}")
curve = sampled_attenuation(
    Cylinder(radius=1.0), Gaussian(0.5), [1.0, 0.7, 0.5], 200_000, direction="projected"
)
first = curve.measured[0]
assert abs(first.value - curve.predicted[0]) < 0.4 * curve.predicted[0] + 4 * first.error
curve

# %% [markdown]
# ## The curvature is there all the same
#
# With enough points and little noise a quadratic fit recovers it; with noise as large as the bend it
# can't. The size of the bend is II r^2 / 2.

# %%
bowl = Paraboloid((1.0, 0.5))
for noise in (0.0, 0.001, 0.05):
    cloud = sample(bowl, Gaussian(0.1), 2000, d=5, noise=noise, seed=0)
    found = fit_second_form(cloud.x, cloud.mu, cloud.tangent)
    print(f"noise {noise}: {found}")
