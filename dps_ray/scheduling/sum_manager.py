"""The SUM manager: owner of the binding state, and what the engine's scheduler talks to.

SUM is the paper's semi-unified memory (section IV-B). Protocol of one scheduler step, all calls
on the scheduler's thread:

1. ``on_restored`` / ``on_restore_failed`` for what the ranks have reported;
2. ``compact``, which moves live blocks before the step names any;
3. allocation: the block pool allocates and releases in ``ledger``, and calls ``lend_for`` when
   neither base nor KV units can serve a request;
4. ``plan_step``, exactly once: its command goes to every rank with the step.
"""

from collections.abc import Callable

from dps_ray.commands import RestoreTask, StepCommand
from dps_ray.modes import Mode, Pin
from dps_ray.scheduling.compaction import Compaction
from dps_ray.scheduling.counters import Counters
from dps_ray.scheduling.layers import LayerReturn, LayerSegments
from dps_ray.scheduling.ledger import UnitLedger
from dps_ray.scheduling.ledger_integrity import check_ledger
from dps_ray.scheduling.orders import PendingOrders
from dps_ray.scheduling.permits import Permits
from dps_ray.scheduling.policy import Pressure, SwitchLimits, SwitchPolicy
from dps_ray.scheduling.residual_return import ResidualReturn
from dps_ray.scheduling.retry import RetryLimits
from dps_ray.scheduling.standby import Standby
from dps_ray.scheduling.unit_blocks import UnitBlocks


class SumManager:
    """Ledger, policy and retries joined to the step protocol above.

    Parameters
    ----------
    ledger
        A new ledger; the block pool shares it.
    limits
        Thresholds and dwell times.
    blocks
        Told of every unit that enters or leaves the KV cache.
    clock
        Monotonic time, seconds.
    pin
        The operator's pin at start-up.
    retry
        Bounds on retries after a failed restore.
    max_moves, save_prefixes
        As in ``Compaction``.
    layers
        Where each layer's residual lies, for layers that return one by one; ``None``: full
        precision returns to all layers at once.
    """

    def __init__(
        self,
        ledger: UnitLedger,
        limits: SwitchLimits,
        blocks: UnitBlocks,
        *,
        clock: Callable[[], float],
        pin: Pin = Pin.AUTO,
        retry: RetryLimits | None = None,
        max_moves: int = 0,
        layers: LayerSegments | None = None,
        save_prefixes: bool = False,
    ) -> None:
        self.ledger = ledger
        self.counters = Counters()
        self._policy = SwitchPolicy(limits, Mode.FAST if pin is Pin.FAST else Mode.FULL)
        self._orders = PendingOrders()
        self._return = ResidualReturn(
            ledger,
            self._orders,
            self.counters,
            blocks,
            clock=clock,
            retry=retry or RetryLimits(),
        )
        self._compaction = Compaction(
            ledger,
            self._orders,
            self.counters,
            blocks,
            max_moves=max_moves,
            save_prefixes=save_prefixes,
        )
        self._standby = Standby(ledger, self._policy, self._return, clock)
        self._blocks = blocks
        self._clock = clock
        self._pin = pin
        self._permits = Permits()
        self._wants_restore = False
        self._settled = False
        """The coming step will be as the latest one, unless a call below says otherwise."""
        self._latest: StepCommand | None = None
        self.layers = LayerReturn(layers, ledger)

    # -- reading ----------------------------------------------------------------------------------

    @property
    def mode(self) -> Mode:
        """Mode of the latest planned step."""
        return self._policy.mode

    @property
    def latest(self) -> StepCommand | None:
        """Command of the latest planned step; the same object again where nothing has changed."""
        return self._latest

    @property
    def settled(self) -> bool:
        """Whether only a lend, a pin or a lack of memory could make the coming step another one."""
        return self._settled

    @property
    def pin(self) -> Pin:
        """The operator's pin."""
        return self._pin

    @property
    def wants_restore(self) -> bool:
        """Whether restores would have begun or gone on in the latest step, permit or not."""
        return self._wants_restore

    @property
    def awaits_permit(self) -> bool:
        """Whether nothing but the permit keeps memory from returning."""
        return self._wants_restore and not self._permits.restore and not self._return.running

    @property
    def restoring(self) -> bool:
        """Whether residual bytes are on their way back; not so while a burst holds them up."""
        return self._return.running

    @property
    def restore_left_s(self) -> float | None:
        """How long the return of all segments will still take, seconds; ``None`` if unknown."""
        return self._return.left_s(self._clock())

    @property
    def fault(self) -> str | None:
        """Why the replica cannot return to full mode, or ``None``."""
        return self._return.retry.fault

    @property
    def gave_up(self) -> bool:
        """A restore failed so often that none is tried any more, until the pin changes."""
        return self._return.retry.exhausted

    @property
    def obtainable_blocks(self) -> int:
        """Elastic blocks that allocation can get now, lending included where it is allowed."""
        lendable = self.ledger.lendable_blocks
        return self.ledger.kv_free_blocks + (lendable if lendable and self._may_lend() else 0)

    @property
    def has_pending_work(self) -> bool:
        """Whether an engine without requests must keep stepping, for its memory or its mode."""
        return self._standby.has_pending_work(self._pin)

    @property
    def idle_pause_s(self) -> float:
        """How long steps of an engine without requests change nothing, seconds."""
        return self._standby.pause_s(self._pin, awaits_permit=self.awaits_permit)

    # -- orders of the block pool and the operator ------------------------------------------------

    def lend_for(self, blocks_needed: int) -> bool:
        """Lend until KV units hold ``blocks_needed`` free blocks; lend nothing if they cannot.

        Returns
        -------
        bool
            Whether ``ledger.kv_free_blocks`` reaches ``blocks_needed``.
        """
        if blocks_needed > self.obtainable_blocks:
            return False
        while self.ledger.kv_free_blocks < blocks_needed:
            self._lend()
        return True

    def set_pin(self, pin: Pin) -> None:
        """Obey ``pin`` from the next step on, and forget failed restores.

        Running restores run on under ``Pin.FAST``; none starts or goes on.
        """
        self._pin = pin
        self._settled = False
        self._return.retry.reset()

    def set_permits(self, permits: Permits) -> None:
        """Obey ``permits`` from this step on; call it before the step's allocation."""
        self._permits = permits
        if permits.stop:
            self._return.stop()

    # -- reports of the ranks ---------------------------------------------------------------------

    def on_restored(self, unit: int, epoch: int) -> bool:
        """Bind a segment that every rank has restored; ``False`` where the report is outdated."""
        return self._return.succeeded(unit, epoch)

    def on_restore_failed(self, unit: int, epoch: int, error: str) -> bool:
        """Return the unit of a restore that failed on some rank to the KV cache.

        The other ranks may still be copying, so the next command cancels the restore everywhere
        and zeroes the unit. ``False`` where the report is outdated.
        """
        return self._return.failed(unit, epoch, error)

    # -- the step ---------------------------------------------------------------------------------

    @property
    def may_compact(self) -> bool:
        """Whether ``compact`` could have anything to do."""
        return self._compaction.may_move

    def compact(self, pressure: Pressure) -> None:
        """Move blocks out of units, once the policy would restore those.

        Parameters
        ----------
        pressure
            Demand before this step's allocation.
        """
        if self._may_restore(pressure, self._clock()):
            self._compaction.run(restores_follow=self._permits.restore)

    def plan_step(self, pressure: Pressure) -> StepCommand:
        """Close the step's allocation: start restores, fix the mode, hand out pending orders.

        Parameters
        ----------
        pressure
            Demand after this step's allocation.
        """
        now = self._clock()
        self._policy.observe(pressure, now)
        if self._settled:
            assert self._latest is not None
            return self._latest
        restore = self._begin_restores(pressure, now)
        mode = self._policy.next_mode(
            pressure,
            self._pin,
            allowed=self.ledger.mode_allowed(),
            now=now,
            stay_full=self._permits.keeps_full(self._pin),
        )
        if self._policy.note_mode(mode, now):
            self.counters.switched_to(mode)
            if mode is Mode.FULL:
                self._return.arrived(now)
        full_layers = self.layers.plan_step(mode, self._policy.heading)
        command = self._orders.take(mode, full_layers, hold=self._return.held, restore=restore)
        self._latest, self._settled = command, self._is_settled(command)
        return command

    def restore_candidates(self) -> tuple[int, ...]:
        """Return the units whose restore could begin in the coming step, in this order."""
        return self._return.candidates()

    # -- integrity --------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Verify the ledger and the pending orders.

        Raises
        ------
        LedgerError
            A sentence on the broken invariant.
        """
        check_ledger(self.ledger)
        self._orders.check_integrity(self.ledger)

    # -- internals --------------------------------------------------------------------------------

    def _is_settled(self, command: StepCommand) -> bool:
        """Whether only a lend, a pin or a lack of memory could make the next step another one.

        In full mode with all memory in place there is nothing to restore, and where the high
        watermark leaves the switch to lending alone demand is not asked.
        """
        return (
            command == StepCommand(Mode.FULL)
            and self._policy.stays_full(self._pin)
            and self.ledger.fully_backed
        )

    def _may_lend(self) -> bool:
        if self.mode is Mode.FULL and self._permits.keeps_full(self._pin):
            return False
        return self._policy.may_lend(self._pin, self._clock())

    def _lend(self) -> None:
        lend = self.ledger.lend()
        assert lend is not None, "obtainable blocks were counted before"
        self._settled = False
        self._orders.lent(lend)
        self._return.lent()
        self._policy.note_lend(self._clock())
        if lend.cancelled is not None:
            self.counters.restores_cancelled += 1
        self.counters.units_lent += 1
        self._blocks.reveal_unit(lend.unit)

    def _begin_restores(self, pressure: Pressure, now: float) -> tuple[RestoreTask, ...]:
        may_restore = self._may_restore(pressure, now)
        candidates = self.restore_candidates() if may_restore else ()
        self._wants_restore = may_restore and (bool(candidates) or self._return.held)
        if not (may_restore and self._permits.restore) or self._permits.stop:
            return ()
        return self._return.advance(candidates, now)

    def _may_restore(self, pressure: Pressure, now: float) -> bool:
        return self._policy.may_restore(pressure, self._pin, now) and self._return.retry.may_start(
            now
        )
