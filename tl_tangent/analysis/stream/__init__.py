"""How tangent and normal parts travel through the residual stream."""
