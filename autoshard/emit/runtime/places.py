"""The micro-batches of a step through the parts of a model on its stages or places, a chain or any other graph.

A value travels directly from the place that makes it to each place that reads it, once to each; its gradients come back
the same way and are added up. All places follow one order of slots (SLOTS); between two places, messages in both
directions are sent and received in the order of the slots that make them, so that no two places wait for each other. A
send is waited for once its reader has sent something made after reading (gloo does not report a send's end), or at the
end of the step. Between places of different meshes each device sends what the other one's layout needs: see
`between_meshes`. The inputs of parts are known beforehand (`Handed`), and every place has the inputs of all
micro-batches; only values computed from them travel.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from .axis import held_indices
from .between_meshes import MeshLayout, pieces, put, taken, whole_sum

if TYPE_CHECKING:
    from .axis import Sent
    from .between_meshes import Piece
    from .loss_scaling import LossScaler
    from .mesh import ParallelMesh

Sources = Sequence[Sequence[tuple[int, int]]]  # of each part's values handed: (part that makes it, position there)


class Handed(NamedTuple):
    """A value that a part receives: its global shape, dtype, layout, and whether it carries a gradient.

    `at`: the shape at other dynamic sizes, which each rank computes: none is sent.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: str
    has_gradient: bool
    at: Callable[..., tuple[int, ...]] | None = None

    def whole(self, sizes: Mapping[str, int] | None = None) -> tuple[int, ...]:
        """Global shape; as planned, or at these sizes."""
        return self.shape if self.at is None or not sizes else self.at(**sizes)

    def local(self, mesh: ParallelMesh, sizes: Mapping[str, int] | None = None) -> tuple[int, ...]:
        """Shape of this rank's part; as planned, or at these sizes."""
        return tuple(len(held_indices(size, dim, self.layout, mesh)) for dim, size in enumerate(self.whole(sizes)))


class PlaceSlot(NamedTuple):
    """The forward (F) or backward (B) of one micro-batch through one part."""

    kind: str
    micro_batch: int
    part: int


class PlaceMessage(NamedTuple):
    """A value (F) of a micro-batch, the output `position` of part `part`, or its gradient (B): between the place of
    that part and `place`, which reads the value."""

    kind: str
    micro_batch: int
    part: int
    position: int
    place: int


class Way(NamedTuple):
    """Layout of a value at its sender, all pieces that travel, and whether a partial sum is added up before."""

    first: MeshLayout
    pieces: tuple[Piece, ...]
    sums: bool


def read_slots(text: str) -> list[PlaceSlot]:
    """Slots of a text: `F0.2 B0.2` is micro-batch 0 through part 2, forward and backward."""
    pairs = [(word[0], *word[1:].split(".")) for word in text.split()]
    return [PlaceSlot(kind, int(micro_batch), int(part)) for kind, micro_batch, part in pairs]


class Routes:
    """Messages that each slot needs and sends. `handed[n]`, `sources[n]`: the inputs of part n, and their sources.
    `turn`: the position of a slot in the order; `sent_at`, `read`: that of the slot that sends a message, and of the
    first that reads it."""

    def __init__(
        self, slots: Sequence[PlaceSlot], part_places: Sequence[int], handed: Sequence[Sequence[Handed]],
        sources: Sources,
    ) -> None:  # fmt: skip
        self.part_places = part_places
        self.turn = {slot: turn for turn, slot in enumerate(slots)}
        self.needs: dict[PlaceSlot, list[PlaceMessage]] = {slot: [] for slot in slots}
        self.sends: dict[PlaceSlot, list[PlaceMessage]] = {slot: [] for slot in slots}
        # (part, position) -> the places that read it; those that give a gradient back
        self.readers: dict[tuple[int, int], dict[int, None]] = {}
        self.returns: dict[tuple[int, int], dict[int, None]] = {}
        for part, pairs in enumerate(sources):
            for value, source in zip(handed[part], pairs, strict=True):
                self.readers.setdefault(source, {})[part_places[part]] = None
                if value.has_gradient:
                    self.returns.setdefault(source, {})[part_places[part]] = None
        last: dict[PlaceMessage, PlaceSlot] = {}  # gradient -> the slot after which its place has all of it
        for slot in slots:
            own_place = part_places[slot.part]
            for value, (maker, position) in zip(handed[slot.part], sources[slot.part], strict=True):
                message = PlaceMessage(slot.kind, slot.micro_batch, maker, position, own_place)
                if part_places[maker] == own_place:
                    continue
                if slot.kind == "F":
                    self.needs[slot].append(message)
                elif value.has_gradient:
                    last[message] = slot
        for message, slot in last.items():
            self.sends[slot].append(message)
        links: dict[tuple[str, int], list[tuple[int, int]]] = {}  # (kind, part) -> (position, another place)
        for kind, every in (("F", self.readers), ("B", self.returns)):
            for (part, position), places in every.items():
                pairs = [(position, place) for place in places if place != part_places[part]]
                links.setdefault((kind, part), []).extend(pairs)
        for slot in slots:
            to = [PlaceMessage(slot.kind, slot.micro_batch, slot.part, *link) for link in links.get(slot[::2], ())]
            (self.sends if slot.kind == "F" else self.needs)[slot] += to
        self.sent_at = {message: turn for turn, messages in enumerate(self.sends.values()) for message in messages}
        self.read: dict[PlaceMessage, int] = {}
        for turn, messages in enumerate(self.needs.values()):
            for message in messages:
                self.read.setdefault(message, turn)
        # Of each place: another one -> the messages between them, as both send and receive them.
        self.between: dict[int, dict[int, list[PlaceMessage]]] = {place: {} for place in part_places}
        for message in self.sent_at:
            maker = part_places[message.part]
            for here, there in ((maker, message.place), (message.place, maker)):
                self.between[here].setdefault(there, []).append(message)

    def uses(self, place: int) -> Counter[PlaceMessage]:
        """Number of parts of a place that read each message it receives."""
        received = (needs for slot, needs in self.needs.items() if self.part_places[slot.part] == place)
        return Counter(message for needs in received for message in needs)


class Places:
    """The parts of the model on this place. `specs[n]`: the layouts of part n's outputs; `inputs[n]`: the positions of
    its inputs among the model's; `labels[n]`: those of its losses among all that are means over labels; `loss_part`
    makes the loss. `ahead`: a receive is posted once its maker's turn in the order is past, not when it is needed."""

    def __init__(
        self, parts: nn.ModuleList, mesh: ParallelMesh, slots: str, part_places: Sequence[int], loss_part: int,
        handed: Sequence[Sequence[Handed]], sources: Sources, inputs: Sequence[Sequence[int]],
        labels: Sequence[Sequence[int]], specs: Sequence[Sequence[str]], ahead: bool = False,
    ) -> None:  # fmt: skip
        assert mesh.stages is not None
        self.parts = dict(zip(mesh.stages.parts, parts, strict=True))
        self.mesh, self.place, self.part_places, self.loss_part = mesh, mesh.stages.index, part_places, loss_part
        self.transport, self.stages = mesh.stages.transport, mesh.stages
        self.handed, self.sources, self.inputs, self.labels = handed, sources, inputs, labels
        self.specs, self.ahead = specs, ahead
        self.read_as = {  # (what is read, the place that reads it) -> as what
            (source, part_places[number]): value
            for number, pairs in enumerate(sources)
            for value, source in zip(handed[number], pairs, strict=True)
        }
        order = read_slots(slots)
        self.training = Routes(order, part_places, handed, sources)
        forward = [slot for slot in order if slot.kind == "F" and slot.micro_batch == 0]
        self.evaluation = Routes(forward, part_places, handed, sources)  # the forwards of one micro-batch
        self.counts_labels = any(labels[number] for number in self.parts)
        self._ways: dict[tuple[str, int, int, int], Way] = {}
        if mesh.device.type != "cpu":
            self._connect()

    def _connect(self) -> None:
        """Opens the connections, pair after pair in one order on all devices. NCCL opens one when both ends reach its
        first message, and each waits for the other; meanwhile a third device may be waiting for this one."""
        rank, firsts = self.mesh.rank + self.stages.firsts[self.place], self.stages.firsts
        pairs: set[tuple[int, int]] = set()
        for message in self.training.sent_at:
            maker = firsts[self.part_places[message.part]]
            reader = firsts[message.place]
            first, second = (maker, reader) if message.kind == "F" else (reader, maker)
            for piece in self.transfer(message, None).pieces:
                ends = sorted((first + piece.sender, second + piece.receiver))
                pairs.add((ends[0], ends[1]))
        for pair in sorted(pairs):
            if rank in pair:
                x = torch.zeros(1, device=self.mesh.device)
                self.transport.send(x, pair[1]).wait() if rank == pair[0] else self.transport.receive(x, pair[0])()

    def transfer(self, message: PlaceMessage, sizes: Mapping[str, int] | None) -> Way:
        """Layout and pieces of a message."""
        key = (message.kind, *message[2:])
        if sizes:
            return self._transfer(message, sizes)
        if key not in self._ways:
            self._ways[key] = self._transfer(message, None)
        return self._ways[key]

    def _transfer(self, message: PlaceMessage, sizes: Mapping[str, int] | None) -> Way:
        source, meshes = (message.part, message.position), self.stages.meshes
        value = self.read_as[source, message.place]
        first = MeshLayout(meshes[self.part_places[message.part]], self.specs[message.part][message.position])
        second = MeshLayout(meshes[message.place], value.layout)
        if message.kind == "B":
            first, second = second.of_gradient, first.of_gradient
        return Way(first, pieces(value.whole(sizes), first, second), first != second)

    def run(
        self,
        micro_batches: Sequence[Sequence[Tensor]],
        shares: Sequence[Sequence[Tensor]],
        scaler: LossScaler | None = None,
        sizes: Sequence[Mapping[str, int]] = (),
    ) -> list[Tensor]:
        """Forward and backward of all micro-batches; gradients are of the mean of the losses (times the scale of
        `scaler`). Returns the losses on the place that makes them, elsewhere nothing. `shares`: see `label_shares`, if
        it `counts_labels`. `sizes`: the dynamic ones of each micro-batch."""
        return _PlacedStep(self, self.training, micro_batches, shares, scaler, sizes).run()

    @torch.no_grad()
    def evaluate(self, inputs: Sequence[Tensor], sizes: Mapping[str, int] | None = None) -> list[Tensor]:
        """Loss of one micro-batch on the place that makes it, elsewhere nothing."""
        return _PlacedStep(self, self.evaluation, [inputs], (), None, [sizes] if sizes else ()).run()


class _PlacedStep:
    """State of one step: the values made, received and sent so far."""

    def __init__(
        self, places: Places, routes: Routes, micro_batches: Sequence[Sequence[Tensor]],
        shares: Sequence[Sequence[Tensor]], scaler: LossScaler | None, sizes: Sequence[Mapping[str, int]],
    ) -> None:  # fmt: skip
        self.places, self.routes, self.micro_batches = places, routes, micro_batches
        self.shares, self.scaler, self.sizes = shares, scaler, sizes
        self.waiting = {place: deque(messages) for place, messages in routes.between[places.place].items()}
        self.arriving: dict[PlaceMessage, list[tuple[Piece, Callable[[], object], Tensor]]] = {}
        # (reader, the turn in which that reads it, on its way, what must stay until then)
        self.sent: list[tuple[int, int, Sent, Tensor]] = []
        self.arrived: dict[PlaceMessage, Tensor] = {}
        self.uses = routes.uses(places.place)
        self.outputs: dict[tuple[int, int], tuple[Tensor, ...]] = {}  # by micro-batch and part
        self.leaves: dict[tuple[int, int], list[Tensor]] = {}
        self.gradients: dict[tuple[int, int, int], Tensor] = {}  # by micro-batch, part and position
        self.losses: list[Tensor] = []

    def run(self) -> list[Tensor]:
        for slot in self.routes.needs:
            if slot.part in self.places.parts:
                if self.places.ahead:
                    self._receive_ahead(self.routes.turn[slot])
                for message in self.routes.needs[slot]:
                    self._receive(message)
                self._forward(slot) if slot.kind == "F" else self._backward(slot)
                for message in self.routes.sends[slot]:
                    self._send(message)
                self.sent = [send for send in self.sent if not send[2].is_completed()]
        for *_, sent, _ in self.sent:
            sent.wait()
        return self.losses

    def _forward(self, slot: PlaceSlot) -> None:
        _, m, part = slot
        places = self.places
        leaves = []
        for value, (maker, position) in zip(places.handed[part], places.sources[part], strict=True):
            local = maker in places.parts
            message = PlaceMessage("F", m, maker, position, places.place)
            output = self.outputs[m, maker][position] if local else self._taken(message)
            leaves.append(output.detach().requires_grad_(value.has_gradient and torch.is_grad_enabled()))
        inputs = [self.micro_batches[m][position] for position in places.inputs[part]]
        shares = [self.shares[m][loss] for loss in places.labels[part]] if self.shares else []
        with places.mesh.micro_batch(m, shares):
            result = places.parts[part](*leaves, *inputs)
        output = result if isinstance(result, tuple) else (result,)
        if part == places.loss_part:
            self.losses.append(output[0].detach())
            output = (output[0] / len(self.micro_batches), *output[1:])
        self.outputs[m, part], self.leaves[m, part] = output, leaves

    def _backward(self, slot: PlaceSlot) -> None:
        _, m, part = slot
        places = self.places
        ends: list[Tensor] = []
        gradients: list[Tensor | None] = []
        for position, output in enumerate(self.outputs.pop((m, part))):
            gradient = self.gradients.pop((m, part, position), None)
            for place in self.routes.returns.get((part, position), ()):
                if place != places.place:
                    arrived = self._taken(PlaceMessage("B", m, part, position, place))
                    gradient = arrived if gradient is None else gradient + arrived
            if part == places.loss_part and position == 0:
                ends.append(output if self.scaler is None else self.scaler.scale(output))
                gradients.append(None)
            elif gradient is not None and output.requires_grad:
                ends.append(output)
                gradients.append(gradient)
        if ends:
            torch.autograd.backward(ends, gradients)
        for value, leaf, source in zip(
            places.handed[part], self.leaves.pop((m, part)), places.sources[part], strict=True
        ):
            if value.has_gradient:
                leaf_grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
                known = self.gradients.get((m, *source))
                self.gradients[(m, *source)] = leaf_grad if known is None else known + leaf_grad

    def _taken(self, message: PlaceMessage) -> Tensor:
        """A received value, freed if no other part here reads it."""
        self.uses[message] -= 1
        return self.arrived[message] if self.uses[message] else self.arrived.pop(message)

    def _peer(self, message: PlaceMessage) -> int:
        maker = self.places.part_places[message.part]
        return message.place if maker == self.places.place else maker

    def _receive_ahead(self, turn: int) -> None:
        """Posts the receives of values made before `turn`; what this place sends earlier has been sent."""
        for peer, waiting in self.waiting.items():
            while waiting and self.routes.sent_at[waiting[0]] < turn:
                self._post(peer, waiting[0])

    def _receive(self, message: PlaceMessage) -> None:
        """Waits for a message and puts it into `arrived`."""
        if message in self.arrived:
            return
        peer = self._peer(message)
        if message not in self.arriving:
            self._post(peer, message)
        received = []
        for piece, wait, buffer in self.arriving.pop(message):
            wait()
            received.append((piece, buffer))
        self._let_go(peer, self.routes.sent_at[message])
        self.arrived[message] = put(self._shape(message), received, self.places.mesh.device, self._dtype(message))

    def _let_go(self, peer: int, turn: int) -> None:
        """Frees sends that `peer` read up to `turn`: it has sent something after that, which is here."""
        pending = []
        for send in self.sent:
            if send[0] == peer and send[1] <= turn:
                send[2].wait()
            else:
                pending.append(send)
        self.sent = pending

    def _send(self, message: PlaceMessage) -> None:
        if message.kind == "F":
            value = self.outputs[message.micro_batch, message.part][message.position].detach()
        else:
            value = self.gradients.pop((message.micro_batch, message.part, message.position))
        self._post(self._peer(message), message, value)

    def _post(self, peer: int, message: PlaceMessage, value: Tensor | None = None) -> None:
        """Posts all messages of this pair of places up to this one."""
        places = self.places
        transport, first, here = places.transport, places.stages.firsts[peer], places.mesh.rank
        while waiting := self.waiting[peer]:
            current = waiting.popleft()
            layout, every, sums = places.transfer(current, self.sizes[current.micro_batch] if self.sizes else None)
            if current == message and value is not None:
                value = whole_sum(value, layout, places.mesh) if sums else value.contiguous()
                for piece in every:
                    if piece.sender == here:
                        sent = taken(value, piece)
                        work = transport.send(sent, first + piece.receiver)
                        self.sent.append((peer, self.routes.read[current], work, sent))
                return
            assert (current.kind == "F") == (current.place == places.place), "what is to be sent before is not made yet"
            self.arriving[current] = arriving = []
            for piece in every:
                if piece.receiver == here:
                    buffer = torch.empty(piece.lengths, dtype=self._dtype(current), device=places.mesh.device)
                    arriving.append((piece, transport.receive(buffer, first + piece.sender), buffer))
            if current == message:
                return
        raise AssertionError(f"{message} is not a message between these places, or was sent before")

    def _shape(self, message: PlaceMessage) -> tuple[int, ...]:
        """Shape of a value, or its gradient, on this rank."""
        kind, m, part, position, _ = message
        if kind == "B":
            return tuple(self.outputs[m, part][position].shape)
        value = self.places.read_as[(part, position), self.places.place]
        return value.local(self.places.mesh, self.sizes[m] if self.sizes else None)

    def _dtype(self, message: PlaceMessage) -> torch.dtype:
        kind, m, part, position, place = message
        if kind == "B":
            return self.outputs[m, part][position].dtype
        return self.places.read_as[(part, position), place].dtype
