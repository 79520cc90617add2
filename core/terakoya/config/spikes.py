"""The part `spikes` of the parameter JSON: what counts as a spike of the loss or the gradient norm."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from terakoya.config.settings import Settings


class Spikes(Settings):
    """How spikes of the loss and of the gradient norm are found, and what happens then."""

    window: Annotated[int, Field(ge=16)] = 32
    """The steps before a step that it is compared with. Unit: optimizer steps."""
    threshold: PositiveFloat = 10.0
    """The distance above the median of the last steps from which a value is a spike; it must also be clearly above
    every value in the window. Unit: robust standard deviations."""
    action: Literal["note", "skip", "rollback"] = "note"
    """`note` records a spike; `skip` also leaves out the update of a step whose gradient norm is a spike; `rollback`
    goes back to the newest checkpoint before a spike of the loss that lasts, and passes over the rows of its steps."""
    lasting_steps: PositiveInt = 3
    """With `rollback`, how long the loss must stay above the limit in a row, the step of the spike included. Unit:
    optimizer steps."""
    max_rollbacks: PositiveInt = 3
    """How often a run may go back; the next spike that lasts ends it with exit code 3."""
