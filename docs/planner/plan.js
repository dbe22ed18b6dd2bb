// Made by tests/support/plannerpage/write.py from lema/plan and what it stands on; not to be
// changed by hand.
"use strict";
const lemaFacts = {"defaults": {"strategy": "streaming", "gradient_checkpointing": "auto", "activation_offloading": false, "boundary_activations": "auto", "prefetch_depth": null, "torch_compile": false, "micro_batch_size": null, "deterministic": false, "packing": false, "tokens_per_step": null, "gradient_accumulation_steps": 1, "shard_weights": false, "shard_optimizer": false, "micro_batch_tokens": null, "sequence_parallel": false, "pad_to_multiple_of": null, "max_steps": null, "counts_tokens": false, "reference": null, "offloading_tier": null, "group_by_length": false, "shuffle": true, "seed": 42, "host_memory": null, "sequence_chunk": null, "keys_values": "auto", "mlp_tile_tokens": null}, "objectives": {"sft": {"examples": "rows", "loss": null}, "dpo": {"examples": "pairs", "loss": {"reference": true, "mismatched": false}}, "ipo": {"examples": "pairs", "loss": {"reference": true, "mismatched": false}}, "orpo": {"examples": "pairs", "loss": {"reference": false, "mismatched": false}}, "simpo": {"examples": "pairs", "loss": {"reference": false, "mismatched": false}}, "kto": {"examples": "labelled rows", "loss": {"reference": true, "mismatched": true}}}, "cards": ["t4", "4090", "h200"], "chunks": [1024, 256], "ranks": [8, 64], "lengths": [512, 1024, 2048, 4096, 8192, 16384, 32768], "lengthsOfHead": [512, 1024, 2048, 4096], "parts": [["used", "in use before the first step"], ["slots", "slots that layers stream through"], ["residents", "layers that stay"], ["outside", "embeddings, norm, head"], ["adapters", "adapter, gradients, optimizer"], ["gradients", "gradients of two layers"], ["working", "one micro-batch in one layer"], ["flight", "hidden states between layers"], ["expanded", "weights of one layer, expanded"], ["gathered", "layers assembled from parts"], ["boundaries", "inputs of layers, kept"], ["keys", "keys, values and their gradients"], ["saved", "activations not recomputed"], ["workspaces", "libraries, and rounding of memory"], ["ring", "buffers that layers are read into"], ["cached", "layers kept in host memory"], ["masters", "weights in fp32"], ["moments", "optimizer state"], ["waiting", "gradients that wait"], ["stepping", "optimizer working memory"], ["process", "interpreter and libraries"], ["model", "the model's files"], ["checkpoint", "one checkpoint"], ["checkpoints", "the checkpoints that are kept"]], "dated": "profiles of lema/plan/machine.py, as of November 2026"};
const { Exception, BaseException, ValueError } = stubs;
stubs.OBJECTIVES = new Map(Object.entries(lemaFacts.objectives));
stubs.objective_of = (config) => lemaFacts.objectives[config.objective].loss;
const lema_config_units = (() => {
const math = stubs.math;
const re = stubs.re;
const ConfigError = stubs.ConfigError;
const MEMORY_PARTS = new Map([["used", "in use before the first step"], ["slots", "slots that layers stream through"], ["residents", "layers that stay"], ["outside", "embeddings, norm, head"], ["adapters", "adapter, gradients, optimizer"], ["gradients", "gradients of two layers"], ["working", "one micro-batch in one layer"], ["flight", "hidden states between layers"], ["expanded", "weights of one layer, expanded"], ["gathered", "layers assembled from parts"], ["boundaries", "inputs of layers, kept"], ["keys", "keys, values and their gradients"], ["saved", "activations not recomputed"], ["workspaces", "libraries, and rounding of memory"], ["ring", "buffers that layers are read into"], ["cached", "layers kept in host memory"], ["masters", "weights in fp32"], ["moments", "optimizer state"], ["waiting", "gradients that wait"], ["stepping", "optimizer working memory"], ["process", "interpreter and libraries"], ["model", "the model's files"], ["checkpoint", "one checkpoint"], ["checkpoints", "the checkpoints that are kept"]]);
const human_bytes = py.named(function(count) {
return py.call(_scaled, [count, " ", ["B", "kB", "MB", "GB", "TB", "PB"]]);
}, ["count"]);
const human_count = py.named(function(count) {
return py.call(_scaled, [count, "", ["", "k", "M", "G", "T", "P"]]);
}, ["count"]);
const human_duration = py.named(function(seconds) {
let days, hour, hours, minute, minutes, second, total_seconds;
total_seconds = py.max(0, py.round(seconds));
;[minutes, second] = py.list(py.divmod(total_seconds, 60));
;[hours, minute] = py.list(py.divmod(minutes, 60));
;[days, hour] = py.list(py.divmod(hours, 24));
if (py.t(days)) {
return [py.format(days, ""), "d ", py.format(hour, ["02"].join('')), "h"].join('');
}
if (py.t(hours)) {
return [py.format(hours, ""), "h ", py.format(minute, ["02"].join('')), "m"].join('');
}
return (py.t(minutes) ? [py.format(minutes, ""), "m ", py.format(second, ["02"].join('')), "s"].join('') : [py.format(second, ""), "s"].join(''));
}, ["seconds"]);
const _scaled = py.named(function(count, space, units) {
let digits, power, size;
size = py.float(count);
power = 0;
while ((py.ge(py.abs(size), 999.5) && py.lt(power, py.sub(py.len(units), 1)))) {
size = py.div(size, 1000);
power = py.add(power, 1);
}
digits = ((py.eq(power, 0) || py.ge(py.abs(size), 99.95)) ? 0 : 1);
return py.rstrip([py.format(size, [".", py.format(digits, ""), "f"].join('')), py.format(space, ""), py.format(py.item(units, power), "")].join(''));
}, ["count", "space", "units"]);
return {MEMORY_PARTS, _scaled, human_bytes, human_count, human_duration};
})();
const lema_engine_head_spans = (() => {
const math = stubs.math;
const PAGE = stubs.PAGE;
const spans_of = py.named(function(size, row_bytes, largest) {
let budget, count, num_rows;
budget = py.sub(largest, py.mul(2, PAGE));
count = math.ceil(py.div(size, py.max(1, py.min(size, py.floordiv(budget, row_bytes)))));
num_rows = math.ceil(py.div(size, count));
return py.tuple((function*(t1) { for (const t2 of t1) { const first = t2; yield [first, py.min(py.add(first, num_rows), size)]; } })(py.iter(py.range(0, size, num_rows))));
}, ["size", "row_bytes", "largest"]);
return {spans_of};
})();
const lema_stream_schedule = (() => {
const math = stubs.math;
const deque = stubs.deque;
const dataclass = stubs.dataclass;
class ExpertGroup {
constructor(number, first, end) { this.number = number; this.first = first; this.end = end; }
}
ExpertGroup.isClass = true;
ExpertGroup.sig = ["number", "first", "end"];
ExpertGroup.fields = ExpertGroup.sig;
const forward_order = py.named(function(num_layers) {
return py.tuple(py.range(num_layers));
}, ["num_layers"]);
const training_order = py.named(function(num_layers, lowest_trained = 0) {
return py.add(py.call(forward_order, [num_layers]), py.tuple(py.range(py.sub(num_layers, 2), py.sub(lowest_trained, 1), (-1))));
}, ["num_layers", "lowest_trained"]);
const in_parts = py.named(function(order, parts, top_layer = null, down = false, pinned = false) {
let layer, layer_parts, leases, number, part, part_order, seen;
leases = py.list();
seen = py.set();
for (const t1 of py.iter(order)) { layer = t1;
layer_parts = py.tuple(py.get(parts, layer, []));
part_order = (py.eq(layer, top_layer) ? py.add(layer_parts, py.slice(layer_parts, null, null, (-1))) : ((py.t(down) || py.has(layer, seen)) ? py.slice(layer_parts, null, null, (-1)) : layer_parts));
py.append(leases, layer);
for (const t2 of py.iter(py.enumerate(part_order))) { ;[number, part] = py.list(t2);
leases = py.add(leases, ((py.t(pinned) && py.t(number)) ? [layer, part] : [part]));
}
leases = py.add(leases, ((py.t(pinned) && py.t(part_order)) ? [layer] : []));
py.add(seen, layer);
}
return py.tuple(leases);
}, ["order", "parts", "top_layer", "down", "pinned"]);
const with_parts = py.named(function(layers, parts) {
return py.union(py.frozenset(layers), ...py.iter((function*(t3) { for (const t4 of t3) { const layer = t4; yield py.get(parts, layer, []); } })(py.iter(layers))));
}, ["layers", "parts"]);
const fetched = py.named(function(order, capacity, in_memory = []) {
let fetches, layer, recent;
recent = [];
fetches = [];
for (const t5 of py.iter(order)) { layer = t5;
if (py.has(layer, in_memory)) {
continue;
}
if (py.has(layer, recent)) {
py.remove(recent, layer);
} else {
py.append(fetches, layer);
}
recent = (py.gt(capacity, 1) ? [...py.iter(py.slice(recent, py.add((-capacity), 1), null, null)), layer] : [layer]);
}
return py.tuple(fetches);
}, ["order", "capacity", "in_memory"]);
const fetched_per_step = py.named(function(num_layers, capacity, in_memory = [], lowest_trained = 0) {
let order;
order = py.call(training_order, [num_layers, lowest_trained]);
return py.slice(py.call(fetched, [py.mul(order, 2), capacity, in_memory]), py.len(py.call(fetched, [order, capacity, in_memory])), null, null);
}, ["num_layers", "capacity", "in_memory", "lowest_trained"]);
class Order {
constructor() {
const self = this;
self._ahead = py.call(deque, []);
self._uses = new Map([]);
self._begun = 0;
}
__len__() {
const self = this;
return py.len(self._ahead);
}
__iter__() {
const self = this;
return py.enumerate(self._ahead, self._begun);
}
get first() {
const self = this;
return (py.t(self._ahead) ? py.item(self._ahead, 0) : null);
}
extend(layers) {
const self = this;
let layer;
for (const t6 of py.iter(layers)) { layer = t6;
py.append(py.setdefault(self._uses, layer, py.call(deque, [])), py.add(self._begun, py.len(self._ahead)));
py.append(self._ahead, layer);
}
}
begin() {
const self = this;
py.popleft(py.item(self._uses, py.popleft(self._ahead)));
self._begun = py.add(self._begun, 1);
}
clear() {
const self = this;
py.clear(self._ahead);
py.clear(self._uses);
}
next_use(layer) {
const self = this;
let uses;
uses = py.get(self._uses, layer);
return (py.t(uses) ? py.item(uses, 0) : math.inf);
}
}
Order.isClass = true;
Order.sig = [];
Order.prototype.__len__.sig = [];
Order.prototype.__iter__.sig = [];
Order.prototype.extend.sig = ["layers"];
Order.prototype.begin.sig = [];
Order.prototype.clear.sig = [];
Order.prototype.next_use.sig = ["layer"];
const index_to_refill = py.named(function(layers, order, number, in_use) {
let best, furthest, index, layer, next_use;
best = null;
furthest = [py.float(number), math.inf];
for (const t7 of py.iter(py.enumerate(layers))) { ;[index, layer] = py.list(t7);
if (py.has(layer, in_use)) {
continue;
}
next_use = ((layer == null) ? [math.inf, math.inf] : [order.next_use(layer), py.float(layer)]);
if (py.gt(next_use, furthest)) {
best = index;
furthest = next_use;
}
}
return best;
}, ["layers", "order", "number", "in_use"]);
return {ExpertGroup, Order, fetched, fetched_per_step, forward_order, in_parts, index_to_refill, training_order, with_parts};
})();
const lema_stream_ring = (() => {
const dataclass = stubs.dataclass;
const field = stubs.field;
const Tensor = stubs.Tensor;
const Backend = stubs.Backend;
const DeviceSlots = stubs.DeviceSlots;
const SlotLayout = stubs.SlotLayout;
const Upload = stubs.Upload;
const StreamMeter = stubs.StreamMeter;
const LayerBytes = stubs.LayerBytes;
const LayerReader = stubs.LayerReader;
const Order = lema_stream_schedule.Order;
const index_to_refill = lema_stream_schedule.index_to_refill;
const upload_to = stubs.upload_to;
const Ticket = stubs.Ticket;
class HostBuffer {
constructor(memory, layer = null, ticket = null, leased = false, uploads = new Map()) { this.memory = memory; this.layer = layer; this.ticket = ticket; this.leased = leased; this.uploads = uploads; }
assign(layer, ticket) {
const self = this;
self.ticket = ticket;
self.layer = layer;
self.leased = false;
}
lease() {
const self = this;
self.leased = true;
}
drain() {
const self = this;
let drained, uploads;
uploads = py.tuple(py.values(self.uploads));
drained = py.named(function() {
let upload;
for (const t1 of py.iter(uploads)) { upload = t1;
upload.drained();
}
}, []);
return (py.t(uploads) ? drained : null);
}
get is_complete() {
const self = this;
return py.either((self.ticket == null), () => py.both(self.ticket.done(), () => (!py.t(self.ticket.failed()))));
}
wait() {
const self = this;
if ((self.ticket != null)) {
self.ticket.wait();
self.ticket = null;
py.clear(self.uploads);
}
}
empty() {
const self = this;
if ((self.ticket != null)) {
self.ticket.cancel();
}
self.ticket = null;
self.layer = self.ticket;
}
}
HostBuffer.isClass = true;
HostBuffer.sig = ["memory", "layer", "ticket", "leased", "uploads"];
HostBuffer.fields = HostBuffer.sig;
HostBuffer.prototype.assign.sig = ["layer", "ticket"];
HostBuffer.prototype.lease.sig = [];
HostBuffer.prototype.drain.sig = [];
HostBuffer.prototype.wait.sig = [];
HostBuffer.prototype.empty.sig = [];
class DeviceSlot {
constructor(ring, layer = null, upload = null, _released = true) { this.ring = ring; this.layer = layer; this.upload = upload; this._released = _released; }
fill(layer, source, layout) {
const self = this;
self.empty();
self.upload = py.call(upload_to, [self.ring, source, layout]);
self.layer = layer;
self._released = false;
return py.bound(self, 'upload');
}
lease() {
const self = this;
;
self._released = false;
return py.bound(self, 'upload').wait();
}
release() {
const self = this;
if (!py.t(self._released)) {
;
self._released = true;
py.bound(self, 'upload').release();
}
}
empty() {
const self = this;
self.release();
self.layer = null;
}
}
DeviceSlot.isClass = true;
DeviceSlot.sig = ["ring", "layer", "upload", "_released"];
DeviceSlot.fields = DeviceSlot.sig;
DeviceSlot.prototype.fill.sig = ["layer", "source", "layout"];
DeviceSlot.prototype.lease.sig = [];
DeviceSlot.prototype.release.sig = [];
DeviceSlot.prototype.empty.sig = [];
class LayerRing {
constructor(layers, passing, host, backend, num_slots, layouts, reader, in_use, meter) {
const self = this;
let on_disk;
self._layers = layers;
self._host = host;
self._backend = backend;
self._reader = reader;
self._layouts = layouts;
self._in_use = in_use;
self._meter = meter;
self._order = new Order();
self._changing = new Map([]);
on_disk = (() => { const made$ = []; for (const t2 of py.iter(passing)) { const layer = t2; if (py.hasnot(layer, host)) { made$.push(layer); } } return made$; })();
self.slot_bytes = self._largest(passing);
self.slots = (() => { const made$ = []; for (const t3 of py.iter(py.range(py.min(num_slots, py.len(passing))))) { const _ = t3; made$.push(new DeviceSlot(backend.device_slots(self.slot_bytes, 1))); } return made$; })();
self.buffers = (() => { const made$ = []; for (const t4 of py.iter(py.range(py.min(num_slots, py.len(on_disk))))) { const _ = t4; made$.push(new HostBuffer(backend.host_buffer(self._largest(on_disk)))); } return made$; })();
}
get announced() {
const self = this;
return py.len(self._order);
}
get first() {
const self = this;
return self._order.first;
}
get reading() {
const self = this;
let pairs;
pairs = (() => { const made$ = []; for (const t5 of py.iter(py.list(self.buffers))) { const buffer = t5; made$.push([buffer.layer, buffer.ticket]); } return made$; })();
return (() => { const made$ = []; for (const t6 of py.iter(pairs)) { const [layer, ticket] = py.list(t6); if (((layer != null) && (ticket != null) && !py.t(ticket.done()))) { made$.push(layer); } } return made$; })();
}
announce(order) {
const self = this;
py.extend(self._order, order);
self.pump();
}
take(layer) {
const self = this;
let buffer, number, slot;
;
if (py.ne(self._order.first, layer)) {
self.cancel();
py.extend(self._order, [layer]);
}
if (py.has(layer, self._changing)) {
self._changing();
py.pop(self._changing, layer, null);
}
self.pump();
try {
if (((buffer = self._buffer_of(layer)) != null)) {
self._wait_for_read(buffer);
if (py.t(buffer.leased)) {
self._meter.counters.count_layer_without_read();
}
buffer.lease();
}
slot = py.next((function*(t8) { for (const t9 of t8) { const slot = t9; if (py.eq(slot.layer, layer)) { yield slot; } } })(py.iter(self.slots)), null);
if ((slot == null)) {
number = self._to_refill(self.slots, py.item(py.next(py.iter(self._order)), 0));
;
slot = self._upload(layer, number);
}
}
catch (caught) {
if (caught instanceof BaseException) {
self.cancel();
throw caught;
} else
{ throw caught; }
}
self._order.begin();
return new _Taken(self, slot);
}
cancel() {
const self = this;
let buffer;
py.clear(self._order);
self._meter.forget_reads();
for (const t10 of py.iter(self.buffers)) { buffer = t10;
if (((buffer.ticket != null) && (!py.t(buffer.ticket.done()) || py.t(buffer.ticket.failed())))) {
buffer.empty();
}
}
}
shrink() {
const self = this;
let buffer, index, layers, number, slot;
number = (py.gt(py.len(self.slots), 1) ? self._to_refill(self.slots, (-1)) : null);
if ((number == null)) {
return false;
}
self._backend.synchronize();
slot = py.pop(self.slots, number);
if (py.gt(py.len(self.buffers), py.len(self.slots))) {
layers = (() => { const made$ = []; for (const t11 of py.iter(self.buffers)) { const buffer = t11; made$.push((py.eq(buffer.layer, slot.layer) ? null : buffer.layer)); } return made$; })();
index = py.call(index_to_refill, [layers, self._order, (-1), self._in_use()]);
if ((index != null)) {
py.pop(self.buffers, index).empty();
}
}
for (const t12 of py.iter(self.buffers)) { buffer = t12;
py.pop(buffer.uploads, py.id(slot), null);
}
slot.empty();
return true;
}
forget(layer, written = null) {
const self = this;
let slot;
if ((written != null)) {
py.set(self._changing, layer, written);
}
for (const t13 of py.iter(self.slots)) { slot = t13;
if (py.eq(slot.layer, layer)) {
if ((py.bound(slot, 'upload') != null)) {
py.bound(slot, 'upload').drained();
}
slot.empty();
}
}
}
flush() {
const self = this;
let changing, written;
changing = self._changing;
self._changing = new Map([]);
for (const t14 of py.iter(py.values(changing))) { written = t14;
py.call(written, [], {});
}
self.pump();
}
close() {
const self = this;
let slot;
for (const t15 of py.iter(self.slots)) { slot = t15;
slot.empty();
}
if (py.t(self.slots)) {
self._backend.synchronize();
}
self.slots = [];
self.buffers = [];
}
raise_failures() {
const self = this;
let buffer, error;
for (const t16 of py.iter(self.buffers)) { buffer = t16;
if (((buffer.ticket != null) && ((error = buffer.ticket.failed()) != null))) {
self.cancel();
throw error;
}
}
}
pump() {
const self = this;
let buffer, index, is_loaded, layer, number;
for (const t17 of py.iter(self._order)) { ;[number, layer] = py.list(t17);
if ((py.has(layer, self._host) || (self._buffer_of(layer) != null))) {
continue;
}
if (((index = self._to_refill(self.buffers, number)) == null)) {
self._meter.buffers_are_full();
break;
}
self._meter.buffer_is_free();
self._read(layer, py.item(self.buffers, index));
}
for (const t18 of py.iter(self._order)) { ;[number, layer] = py.list(t18);
if (py.t(py.any((function*(t19) { for (const t20 of t19) { const slot = t20; yield py.eq(slot.layer, layer); } })(py.iter(self.slots))))) {
continue;
}
if (py.has(layer, self._changing)) {
break;
}
buffer = self._buffer_of(layer);
is_loaded = py.either(py.has(layer, self._host), () => py.both((buffer != null), () => buffer.is_complete));
if ((!py.t(is_loaded) || ((index = self._to_refill(self.slots, number)) == null))) {
break;
}
self._upload(layer, index);
}
}
_to_refill(candidates, number) {
const self = this;
return py.call(index_to_refill, [(() => { const made$ = []; for (const t21 of py.iter(candidates)) { const candidate = t21; made$.push(candidate.layer); } return made$; })(), self._order, number, self._in_use()]);
}
_buffer_of(layer) {
const self = this;
return py.next((function*(t22) { for (const t23 of t22) { const buffer = t23; if (py.eq(buffer.layer, layer)) { yield buffer; } } })(py.iter(self.buffers)), null);
}
_read(layer, buffer) {
const self = this;
let slot, stored, ticket;
for (const t24 of py.iter(self.slots)) { slot = t24;
if (((buffer.layer != null) && py.eq(slot.layer, buffer.layer))) {
slot.empty();
}
}
buffer.empty();
stored = py.item(self._layers, layer);
ticket = py.method(self._reader, 'submit', [stored, py.bound(buffer, 'memory'), buffer.drain()], {name: stored.called(layer)});
buffer.assign(layer, ticket);
self._meter.counters.count_read();
}
_wait_for_read(buffer) {
const self = this;
if (((buffer.ticket == null) || py.t(buffer.ticket.done()))) {
buffer.wait();
return null;
}
const t25 = self._meter.waiting_for_disk(self._name_of(buffer.layer));
py.enter(t25); try {
buffer.wait();
} finally { py.exit(t25); }
}
_upload(layer, number) {
const self = this;
let buffer, layout, slot, source, upload;
buffer = self._buffer_of(layer);
slot = py.item(self.slots, number);
layout = py.item(self._layouts, layer);
if ((buffer != null)) {
buffer.wait();
}
source = ((buffer == null) ? py.item(self._host, layer) : py.bound(buffer, 'memory'));
const t26 = py.method(self._meter.trace, 'span', ["upload", self._name_of(layer)], {nbytes: layout.copied});
py.enter(t26); try {
upload = slot.fill(layer, source, layout);
} finally { py.exit(t26); }
if ((buffer != null)) {
py.set(buffer.uploads, py.id(slot), upload);
}
self._meter.counters.count_upload(layout.copied);
return slot;
}
_name_of(layer) {
const self = this;
return ((layer == null) ? "" : py.item(self._layers, layer).called(layer));
}
_largest(layers) {
const self = this;
return py.max.call({default: 0}, (function*(t27) { for (const t28 of t27) { const layer = t28; yield py.item(self._layers, layer).nbytes; } })(py.iter(layers)));
}
}
LayerRing.isClass = true;
LayerRing.sig = ["layers", "passing", "host", "backend", "num_slots", "layouts", "reader", "in_use", "meter"];
LayerRing.prototype.announce.sig = ["order"];
LayerRing.prototype.take.sig = ["layer"];
LayerRing.prototype.cancel.sig = [];
LayerRing.prototype.shrink.sig = [];
LayerRing.prototype.forget.sig = ["layer", "written"];
LayerRing.prototype.flush.sig = [];
LayerRing.prototype.close.sig = [];
LayerRing.prototype.raise_failures.sig = [];
LayerRing.prototype.pump.sig = [];
LayerRing.prototype._to_refill.sig = ["candidates", "number"];
LayerRing.prototype._buffer_of.sig = ["layer"];
LayerRing.prototype._read.sig = ["layer", "buffer"];
LayerRing.prototype._wait_for_read.sig = ["buffer"];
LayerRing.prototype._upload.sig = ["layer", "number"];
LayerRing.prototype._name_of.sig = ["layer"];
LayerRing.prototype._largest.sig = ["layers"];
class _Taken {
constructor(ring, slot) {
const self = this;
self._ring = ring;
self._slot = slot;
}
wait() {
const self = this;
let name;
name = self._ring._name_of(self._slot.layer);
const t29 = self._ring._meter.waiting_for_upload(name);
py.enter(t29); try {
return self._slot.lease();
} finally { py.exit(t29); }
}
release() {
const self = this;
self._slot.release();
py.sort.call({key: ((slot) => ((slot === self._slot)))}, self._ring.slots);
self._ring.pump();
}
drained() {
const self = this;
if ((py.bound(self._slot, 'upload') != null)) {
py.bound(self._slot, 'upload').drained();
}
}
}
_Taken.isClass = true;
_Taken.sig = ["ring", "slot"];
_Taken.prototype.wait.sig = [];
_Taken.prototype.release.sig = [];
_Taken.prototype.drained.sig = [];
const ring_bytes = py.named(function(num_slots, layers) {
return py.mul(py.min(num_slots, py.len(layers)), py.max.call({default: 0}, layers));
}, ["num_slots", "layers"]);
return {DeviceSlot, HostBuffer, LayerRing, _Taken, ring_bytes};
})();
const lema_stream_residents = (() => {
const dataclass = stubs.dataclass;
const Tensor = stubs.Tensor;
const Backend = stubs.Backend;
const Upload = stubs.Upload;
const StreamMeter = stubs.StreamMeter;
const LayerBytes = stubs.LayerBytes;
const LayerReader = stubs.LayerReader;
const Ticket = stubs.Ticket;
class ArrivingLayer {
constructor(name, ticket, memory) { this.name = name; this.ticket = ticket; this.memory = memory; }
}
ArrivingLayer.isClass = true;
ArrivingLayer.sig = ["name", "ticket", "memory"];
ArrivingLayer.fields = ArrivingLayer.sig;
const begin_reading = py.named(function(numbers, layers, backend, reader) {
let arriving, buffer, memory, name, number, ticket;
memory = new Map((() => { const made$ = []; for (const t1 of py.iter(numbers)) { const number = t1; made$.push([number, backend.host_buffer(py.item(layers, number).nbytes)]); } return made$; })());
arriving = py.dict();
for (const t2 of py.iter(py.items(memory))) { ;[number, buffer] = py.list(t2);
name = py.item(layers, number).called(number);
ticket = py.method(reader, 'submit', [py.item(layers, number), buffer], {name: name});
py.set(arriving, number, new ArrivingLayer(name, ticket, buffer));
}
return arriving;
}, ["numbers", "layers", "backend", "reader"]);
class ResidentLayers {
constructor(arriving, uploads, released, backend, meter) {
const self = this;
self.numbers = py.or_(py.frozenset(arriving), py.frozenset(uploads));
self.slots = new Map((() => { const made$ = []; for (const t3 of py.iter(py.items(uploads))) { const [number, upload] = py.list(t3); made$.push([number, upload.wait()]); } return made$; })());
self._arriving = py.dict(arriving);
self._uploads = (py.t(released) ? py.dict(uploads) : new Map([]));
self._backend = backend;
self._meter = meter;
}
slot(number) {
const self = this;
let layer, memory;
if (py.has(number, self._arriving)) {
layer = py.item(self._arriving, number);
const t4 = self._meter.waiting_for_disk(layer.name);
py.enter(t4); try {
layer.ticket.wait();
} finally { py.exit(t4); }
memory = py.bound(layer, 'memory');
py.set(self.slots, number, self._backend.device_slots(memory.numel(), 1).upload(memory).wait());
py.del(self._arriving, number);
}
return py.item(self.slots, number);
}
upload(number) {
const self = this;
return py.item(self._uploads, number);
}
load() {
const self = this;
let number;
for (const t5 of py.iter(py.list(self._arriving))) { number = t5;
self.slot(number);
}
}
cancel() {
const self = this;
let layer;
for (const t6 of py.iter(py.values(self._arriving))) { layer = t6;
layer.ticket.cancel();
}
}
clear() {
const self = this;
py.clear(self.slots);
py.clear(self._arriving);
py.clear(self._uploads);
}
}
ResidentLayers.isClass = true;
ResidentLayers.sig = ["arriving", "uploads", "released", "backend", "meter"];
ResidentLayers.prototype.slot.sig = ["number"];
ResidentLayers.prototype.upload.sig = ["number"];
ResidentLayers.prototype.load.sig = [];
ResidentLayers.prototype.cancel.sig = [];
ResidentLayers.prototype.clear.sig = [];
return {ArrivingLayer, ResidentLayers, begin_reading};
})();
const lema_stream_preload = (() => {
const deque = stubs.deque;
const Tensor = stubs.Tensor;
const Backend = stubs.Backend;
const Replicas = stubs.Replicas;
const SlotLayout = stubs.SlotLayout;
const Upload = stubs.Upload;
const read_only = stubs.read_only;
const NonFiniteError = stubs.NonFiniteError;
const ReadError = stubs.ReadError;
const LayerBytes = stubs.LayerBytes;
const LayerReader = stubs.LayerReader;
const upload_to = stubs.upload_to;
const Ticket = stubs.Ticket;
const TOGETHER = 2;
const fill = py.named(function(residents, host_cached, layers, backend, reader, shared, layouts, loaded_layers = new Map([])) {
let _, buffer, cached, error, failure, host, layer, memory, replicas, temporary, to_read, uploads;
if ((!py.t(residents) && !py.t(host_cached))) {
return [new Map([]), new Map([])];
}
replicas = backend.replicas;
cached = py.sorted(host_cached);
uploads = py.dict();
shared = py.both(shared, () => py.both(py.bool(cached), () => py.gt(replicas.local_size, 1)));
;[memory, host] = py.list(py.call(_host_memory, [cached, layers, backend, loaded_layers], {shared: shared}));
to_read = (py.t(shared) ? py.slice(cached, replicas.local_rank, null, replicas.local_size) : (() => { const made$ = []; for (const t1 of py.iter(cached)) { const layer = t1; if (py.hasnot(layer, loaded_layers)) { made$.push(layer); } } return made$; })());
failure = null;
try {
temporary = py.call(_read_layers, [py.sorted(residents), layers, reader, ((layer) => (backend.host_buffer(py.item(layers, layer).nbytes)))]);
for (const t3 of py.iter(temporary)) { ;[layer, buffer] = py.list(t3);
py.set(uploads, layer, py.call(upload_to, [backend.device_slots(buffer.numel(), 1), buffer, py.item(layouts, layer)]));
py.item(uploads, layer).wait();
backend.synchronize();
}
for (const t4 of py.iter(py.call(_read_layers, [to_read, layers, reader, ((key) => py.item(host, key))]))) { _ = t4;
;
}
}
catch (caught) {
if (caught instanceof ReadError || caught instanceof NonFiniteError) {
error = caught;
failure = error;
} else
{ throw caught; }
}
py.call(_agree, [replicas, failure]);
if (((memory != null) && py.t(backend.memory().shared))) {
py.call(read_only, [memory]);
}
return [uploads, host];
}, ["residents", "host_cached", "layers", "backend", "reader", "shared", "layouts", "loaded_layers"]);
const _host_memory = py.named(function(cached, layers, backend, loaded_layers, shared) {
let memory, sizes;
if (!py.t(shared)) {
return [null, new Map((() => { const made$ = []; for (const t5 of py.iter(cached)) { const layer = t5; made$.push([layer, (py.has(layer, loaded_layers) ? py.item(loaded_layers, layer) : backend.host_buffer(py.item(layers, layer).nbytes))]); } return made$; })())];
}
sizes = (() => { const made$ = []; for (const t6 of py.iter(cached)) { const layer = t6; made$.push(py.item(layers, layer).nbytes); } return made$; })();
memory = backend.host_buffer(py.sum(sizes), backend.replicas.shared_memory(py.sum(sizes)));
return [memory, py.dict(py.zip.call({strict: true}, cached, memory.split(sizes)))];
}, ["cached", "layers", "backend", "loaded_layers", "shared"]);
const _read_layers = py.named(function*(layer_indices, layers, reader, memory) {
let _, buffer, layer, left, name, pending, ticket;
pending = py.call(deque, []);
left = py.call(deque, [layer_indices]);
try {
while ((py.t(left) || py.t(pending))) {
while ((py.t(left) && py.lt(py.len(pending), TOGETHER))) {
layer = py.popleft(left);
buffer = py.call(memory, [layer], {});
name = py.item(layers, layer).called(layer);
py.append(pending, [layer, buffer, py.method(reader, 'submit', [py.item(layers, layer), buffer], {name: name})]);
}
py.item(py.item(pending, 0), 2).wait();
yield py.slice(py.popleft(pending), null, 2, null);
}
}
finally {
for (const t8 of py.iter(pending)) { ;[_, _, ticket] = py.list(t8);
ticket.cancel();
}
}
}, ["layer_indices", "layers", "reader", "memory"]);
const _agree = stubs._agree;
return {TOGETHER, _agree, _host_memory, _read_layers, fill};
})();
const lema_stream_stream = (() => {
const time = stubs.time;
const AbstractContextManager = stubs.AbstractContextManager;
const contextmanager = stubs.contextmanager;
const replace = stubs.replace;
const Path = stubs.Path;
const Tensor = stubs.Tensor;
const Backend = stubs.Backend;
const Upload = stubs.Upload;
const in_host_memory = stubs.in_host_memory;
const NO_TRACE = stubs.NO_TRACE;
const NoTrace = stubs.NoTrace;
const StreamCounters = stubs.StreamCounters;
const StreamMeter = stubs.StreamMeter;
const GatheredBuffers = stubs.GatheredBuffers;
const stream_layout = stubs.stream_layout;
const Lease = stubs.Lease;
const OpenLeases = stubs.OpenLeases;
const LayerBytes = stubs.LayerBytes;
const vector_aligned = stubs.vector_aligned;
const views = stubs.views;
const fill = lema_stream_preload.fill;
const LayerReader = stubs.LayerReader;
const ResidentLayers = lema_stream_residents.ResidentLayers;
const begin_reading = lema_stream_residents.begin_reading;
const LayerRing = lema_stream_ring.LayerRing;
const ExpertGroup = lema_stream_schedule.ExpertGroup;
const forward_order = lema_stream_schedule.forward_order;
const in_parts = lema_stream_schedule.in_parts;
const training_order = lema_stream_schedule.training_order;
const with_parts = lema_stream_schedule.with_parts;
class LayerStream {
constructor(layers, backend, prefetch_depth = 2, residents = [], host_cached = [], sharded = false, groups = new Map([]), reader = null, loaded_layers = new Map([]), trace = NO_TRACE, clock = time.perf_counter) {
const self = this;
let arriving, late, layout, parts_of, replicas, stay, uploads;
self.layers = (!py.t(py.call(in_host_memory, [backend])) ? py.tuple(layers) : py.tuple(py.map(vector_aligned, layers)));
self.groups = groups;
self._backend = backend;
self._meter = py.call(StreamMeter, [trace, clock]);
self._reader = py.either(reader, () => py.call(LayerReader, [], {trace: trace}));
self.num_slots = py.add(prefetch_depth, 1);
replicas = backend.replicas;
sharded = py.both(sharded, () => py.gt(replicas.size, 1));
layout = py.call(stream_layout, [self.layers, backend], {sharded: sharded});
self._lazy = layout.lazy;
self._leases = py.call(OpenLeases, [layout.in_slots, self.num_visited, backend, self._meter], {aligned: layout.packed});
self._gathered = null;
if (py.t(sharded)) {
parts_of = (() => { const made$ = []; for (const t1 of py.iter(layout.layouts)) { const part = t1; made$.push(part.nbytes); } return made$; })();
self._gathered = py.call(GatheredBuffers, [parts_of, backend, py.bound(self, '_part'), self._meter]);
}
stay = py.call(with_parts, [residents, self.parts]);
late = py.both(py.eq(replicas.size, 1), () => py.both(backend.memory().shared, () => (!py.t(layout.lazy))));
arriving = (py.t(late) ? py.call(begin_reading, [py.sorted(stay), self.layers, backend, self._reader]) : new Map([]));
;[uploads, self._host] = py.list(py.call(fill, [py.sub(stay, py.keys(arriving)), py.sub(py.call(with_parts, [host_cached, self.parts]), stay), py.bound(layout, 'stored'), backend, self._reader], {shared: (!py.t(sharded)), layouts: layout.layouts, loaded_layers: loaded_layers}));
self._resident = py.call(ResidentLayers, [arriving, uploads], {released: py.either(sharded, () => layout.lazy), backend: backend, meter: self._meter});
self._ring = py.call(LayerRing, [py.bound(layout, 'stored'), (() => { const made$ = []; for (const t2 of py.iter(py.range(py.len(self.layers)))) { const layer = t2; if (py.hasnot(layer, stay)) { made$.push(layer); } } return made$; })(), self._host, backend], {num_slots: self.num_slots, layouts: layout.layouts, reader: self._reader, in_use: py.bound(self, '_in_use'), meter: self._meter});
}
get num_visited() {
const self = this;
return py.sub(py.len(self.layers), py.sum(py.map(py.len, py.values(self.groups))));
}
get residents() {
const self = this;
return self._resident.numbers;
}
get host_cached() {
const self = this;
return py.frozenset(self._host);
}
get slot_bytes() {
const self = this;
return self._ring.slot_bytes;
}
get sharded() {
const self = this;
return (self._gathered != null);
}
get trace() {
const self = this;
return self._meter.trace;
}
unchanged(files) {
const self = this;
return py.either((self._reader.first_reads == null), () => self._reader.first_reads.still_in(files));
}
get parts() {
const self = this;
return new Map((() => { const made$ = []; for (const t4 of py.iter(py.items(self.groups))) { const [at, groups] = py.list(t4); made$.push([at, (() => { const made$ = []; for (const t3 of py.iter(groups)) { const group = t3; made$.push(group.number); } return made$; })()]); } return made$; })());
}
get counters() {
const self = this;
return py.replace(self._meter.counters, {bytes_read: self._reader.bytes_read});
}
announce(order) {
const self = this;
let upcoming;
upcoming = ((self._gathered == null) ? order : self._gathered.announce(order));
self._ring.announce((function*(t5) { for (const t6 of t5) { const layer = t6; if (py.hasnot(layer, self.residents)) { yield layer; } } })(py.iter(upcoming)));
}
training_order(lowest_trained, first = 0) {
const self = this;
let order;
order = py.slice(py.call(training_order, [self.num_visited, lowest_trained]), first, null, null);
return py.call(in_parts, [order, self.parts], {top_layer: py.sub(self.num_visited, 1)});
}
get announced() {
const self = this;
return ((self._gathered == null) ? self._ring.announced : self._gathered.announced);
}
calling(before_lease) {
const self = this;
return self._leases.calling(before_lease);
}
*lease(layer) {
const self = this;
let lease, slot, upload;
if (py.has(layer, self._leases.by_layer)) {
yield py.item(self._leases.by_layer, layer);
return null;
}
self._leases.prepare();
self._ring.raise_failures();
self._meter.counters.count_lease();
if ((self._gathered != null)) {
;
if (!py.t(self._gathered.begin(layer))) {
self.cancel();
self.announce([layer]);
self._gathered.begin(layer);
}
const t7 = self._gathered.lease(layer);
slot = py.enter(t7); try {
const t8 = self._leases.hold(layer, slot);
lease = py.enter(t8); try {
yield lease;
} finally { py.exit(t8); }
} finally { py.exit(t7); }
} else {
if ((py.has(layer, self.residents) && !py.t(self._lazy))) {
const t9 = self._leases.hold(layer, self._resident.slot(layer));
lease = py.enter(t9); try {
yield lease;
} finally { py.exit(t9); }
} else {
upload = self._part(layer);
try {
const t11 = self._leases.hold(layer, upload.wait());
lease = py.enter(t11); try {
yield lease;
} finally { py.exit(t11); }
}
finally {
upload.release();
}
}
}
}
join_idle(order) {
const self = this;
let layer;
if ((self._gathered == null)) {
return null;
}
order = py.tuple(order);
if (!py.t(self.announced)) {
self.announce(order);
}
for (const t12 of py.iter(order)) { layer = t12;
const t13 = self.lease(layer);
py.enter(t13); try {
;
} finally { py.exit(t13); }
}
}
_part(layer) {
const self = this;
return (py.has(layer, self.residents) ? self._resident.upload(layer) : self._ring.take(layer));
}
_in_use() {
const self = this;
if ((self._gathered == null)) {
return py.sub(py.keys(self._leases.by_layer), self.residents);
}
return py.sub(self._gathered.in_flight, self.residents);
}
name_of(number) {
const self = this;
return py.item(self.layers, number).called(number);
}
activity() {
const self = this;
return [py.list(self._leases.by_layer), self._ring.first, self._ring.reading];
}
stored(layer) {
const self = this;
;
return py.call(views, [py.item(self._host, layer), py.item(self.layers, layer)]);
}
*rewritten(layer) {
const self = this;
;
self._ring.forget(layer);
yield null;
self._ring.pump();
}
rewrite(layer, written) {
const self = this;
;
self._ring.forget(layer, written);
}
flush() {
const self = this;
self._ring.flush();
}
make_private(layers) {
const self = this;
let layer, memory;
for (const t14 of py.iter(layers)) { layer = t14;
memory = self._backend.host_buffer(py.item(self.layers, layer).nbytes);
const t15 = self.rewritten(layer);
py.enter(t15); try {
py.set(self._host, layer, memory.copy_(py.item(self._host, layer)));
} finally { py.exit(t15); }
}
}
cancel() {
const self = this;
self._ring.cancel();
if ((self._gathered != null)) {
self._gathered.cancel();
}
}
shrink() {
const self = this;
let shrunk;
if ((py.le(py.len(self._ring.slots), 2) && py.t(self.parts))) {
return false;
}
shrunk = self._ring.shrink();
self.num_slots = (py.t(shrunk) ? py.len(self._ring.slots) : self.num_slots);
return shrunk;
}
load_residents() {
const self = this;
self._resident.load();
}
leave() {
const self = this;
self.cancel();
self._resident.cancel();
}
close() {
const self = this;
self.leave();
self._reader.close();
if ((self._gathered != null)) {
self._gathered.close();
}
self._ring.close();
py.clear(self._leases);
py.clear(self._host);
py.clear(self._resident);
}
}
LayerStream.isClass = true;
LayerStream.sig = ["layers", "backend", "prefetch_depth", "residents", "host_cached", "sharded", "groups", "reader", "loaded_layers", "trace", "clock"];
LayerStream.prototype.unchanged.sig = ["files"];
LayerStream.prototype.announce.sig = ["order"];
LayerStream.prototype.training_order.sig = ["lowest_trained", "first"];
LayerStream.prototype.calling.sig = ["before_lease"];
LayerStream.prototype.lease = py.contextmanager(LayerStream.prototype.lease);
LayerStream.prototype.lease.sig = ["layer"];
LayerStream.prototype.join_idle.sig = ["order"];
LayerStream.prototype._part.sig = ["layer"];
LayerStream.prototype._in_use.sig = [];
LayerStream.prototype.name_of.sig = ["number"];
LayerStream.prototype.activity.sig = [];
LayerStream.prototype.stored.sig = ["layer"];
LayerStream.prototype.rewritten = py.contextmanager(LayerStream.prototype.rewritten);
LayerStream.prototype.rewritten.sig = ["layer"];
LayerStream.prototype.rewrite.sig = ["layer", "written"];
LayerStream.prototype.flush.sig = [];
LayerStream.prototype.make_private.sig = ["layers"];
LayerStream.prototype.cancel.sig = [];
LayerStream.prototype.shrink.sig = [];
LayerStream.prototype.load_residents.sig = [];
LayerStream.prototype.leave.sig = [];
LayerStream.prototype.close.sig = [];
return {LayerStream};
})();
const lema_activations_boundaries = (() => {
const deque = stubs.deque;
const dataclass = stubs.dataclass;
const Path = stubs.Path;
const torch = stubs.torch;
const Tensor = stubs.Tensor;
const DiskStore = stubs.DiskStore;
const HostPiece = stubs.HostPiece;
const HostPool = stubs.HostPool;
const WaitingPiece = stubs.WaitingPiece;
const Carrier = stubs.Carrier;
const DeviceSlots = stubs.DeviceSlots;
const Download = stubs.Download;
const Downloaded = stubs.Downloaded;
const Upload = stubs.Upload;
const has_addresses = stubs.has_addresses;
const NO_TRACE = stubs.NO_TRACE;
const NoTrace = stubs.NoTrace;
const OffloadFile = stubs.OffloadFile;
const whole_blocks = stubs.whole_blocks;
const NUM_BUFFERS = 3;
const boundaries_on_device = py.named(function(tier, waiting, largest) {
return (py.eq(tier, "device") ? waiting : py.min(waiting, py.mul(NUM_BUFFERS, largest)));
}, ["tier", "waiting", "largest"]);
const boundaries_in_host = py.named(function(tier, waiting, largest) {
return py.item(new Map([["device", 0], ["host", waiting], ["disk", py.min(waiting, py.mul(NUM_BUFFERS, largest))]]), tier);
}, ["tier", "waiting", "largest"]);
return {NUM_BUFFERS, boundaries_in_host, boundaries_on_device};
})();
const lema_activations_chunks_copies = (() => {
const deque = stubs.deque;
const contextmanager = stubs.contextmanager;
const torch = stubs.torch;
const Tensor = stubs.Tensor;
const view_like = stubs.view_like;
const Cut = stubs.Cut;
const Carrier = stubs.Carrier;
const DeviceSlots = stubs.DeviceSlots;
const Download = stubs.Download;
const SlotLayout = stubs.SlotLayout;
const Span = stubs.Span;
const Upload = stubs.Upload;
const NUM_SLOTS = 2;
const NUM_LEAVING = 2;
const chunks_on_device = py.named(function(chunk_bytes) {
return py.mul(py.add(py.mul(2, NUM_SLOTS), NUM_LEAVING), chunk_bytes);
}, ["chunk_bytes"]);
return {NUM_LEAVING, NUM_SLOTS, chunks_on_device};
})();
const lema_activations_stepstore = (() => {
const tempfile = stubs.tempfile;
const weakref = stubs.weakref;
const AbstractContextManager = stubs.AbstractContextManager;
const closing = stubs.closing;
const contextmanager = stubs.contextmanager;
const Path = stubs.Path;
const torch = stubs.torch;
const Tensor = stubs.Tensor;
const nn = stubs.nn;
const Key = stubs.Key;
const Tier = stubs.Tier;
const TierName = stubs.TierName;
const make_tier = stubs.make_tier;
const Cuts = stubs.Cuts;
const DiskStore = stubs.DiskStore;
const HostPool = stubs.HostPool;
const HostStore = stubs.HostStore;
const Offload = stubs.Offload;
const Order = stubs.Order;
const Packed = stubs.Packed;
const Piece = stubs.Piece;
const WeightStorages = stubs.WeightStorages;
const WeightView = stubs.WeightView;
const everything = stubs.everything;
const Counters = stubs.Counters;
const StayReason = stubs.StayReason;
const Store = stubs.Store;
const Carrier = stubs.Carrier;
const NO_TRACE = stubs.NO_TRACE;
const NoTrace = stubs.NoTrace;
const OffloadFile = stubs.OffloadFile;
const STAGING = py.mul(256, py.pow(2, 20));
const graphs_on_device = py.named(function(staying, passing) {
return py.add(py.sum(staying), py.max.call({default: 0}, passing));
}, ["staying", "passing"]);
const graphs_in_host = py.named(function(tier, nbytes) {
return py.item(new Map([["device", 0], ["host", nbytes], ["disk", py.min(nbytes, STAGING)]]), tier);
}, ["tier", "nbytes"]);
return {STAGING, graphs_in_host, graphs_on_device};
})();
const lema_plan_cost = (() => {
const math = stubs.math;
const dataclass = stubs.dataclass;
const replace = stubs.replace;
const cached_property = stubs.cached_property;
const lru_cache = stubs.lru_cache;
const accumulate = stubs.accumulate;
const fetched = lema_stream_schedule.fetched;
const forward_order = lema_stream_schedule.forward_order;
const in_parts = lema_stream_schedule.in_parts;
const training_order = lema_stream_schedule.training_order;
const with_parts = lema_stream_schedule.with_parts;
const Tier = stubs.Tier;
class Allocation {
constructor(slots, residents = py.frozenset(), host_cached = py.frozenset(), boundaries = "device", saved = py.frozenset(), saved_on = "device", pieces = 0, recompute = true, experts = 0, runs_again = false, products = py.frozenset()) { this.slots = slots; this.residents = residents; this.host_cached = host_cached; this.boundaries = boundaries; this.saved = saved; this.saved_on = saved_on; this.pieces = pieces; this.recompute = recompute; this.experts = experts; this.runs_again = runs_again; this.products = products; }
summary() {
const self = this;
let counts, parts, waiting, where;
counts = new Map([["resident", py.len(self.residents)], ["cached in host memory", py.len(self.host_cached)]]);
counts = py.or_(counts, new Map([["not recomputed", py.len(self.saved)], ["recomputed but for products", py.len(self.products)]]));
counts = py.or_(counts, new Map([["pieces of the head streamed", self.pieces], ["experts in a slot", self.experts]]));
parts = (() => { const made$ = []; for (const t1 of py.iter(py.items(counts))) { const [what, count] = py.list(t1); if ((py.t(count) || py.eq(what, "resident"))) { made$.push([py.format(count, ""), " ", py.format(what, "")].join('')); } } return made$; })();
parts = py.add(parts, py.mul(["what comes before experts run again for each backward"], self.runs_again));
where = new Map([["device", ""], ["host", "in host memory"], ["disk", "on disk"]]);
waiting = new Map([["boundaries", py.item(where, self.boundaries)], ["activations", (py.t(self.saved) ? py.item(where, self.saved_on) : "")]]);
return py.join(", ", py.add(parts, (() => { const made$ = []; for (const t2 of py.iter(py.items(waiting))) { const [what, location] = py.list(t2); if (py.t(location)) { made$.push([py.format(what, ""), " ", py.format(location, "")].join('')); } } return made$; })()));
}
}
Allocation.isClass = true;
Allocation.sig = ["slots", "residents", "host_cached", "boundaries", "saved", "saved_on", "pieces", "recompute", "experts", "runs_again", "products"];
Allocation.fields = Allocation.sig;
Allocation.prototype.summary.sig = [];
class LayerCost {
constructor(slot_bytes, read_bytes, upload_bytes, saved_bytes = 0, expand = 0.0, forward = 0.0, recompute = 0.0, backward = 0.0, micro_saved_bytes = 0, gradient_bytes = 0, groups = [], product_bytes = 0, without_products = 0.0) { this.slot_bytes = slot_bytes; this.read_bytes = read_bytes; this.upload_bytes = upload_bytes; this.saved_bytes = saved_bytes; this.expand = expand; this.forward = forward; this.recompute = recompute; this.backward = backward; this.micro_saved_bytes = micro_saved_bytes; this.gradient_bytes = gradient_bytes; this.groups = groups; this.product_bytes = product_bytes; this.without_products = without_products; }
get product_seconds() {
const self = this;
return py.max(0.0, py.sub(self.recompute, self.without_products));
}
}
LayerCost.isClass = true;
LayerCost.sig = ["slot_bytes", "read_bytes", "upload_bytes", "saved_bytes", "expand", "forward", "recompute", "backward", "micro_saved_bytes", "gradient_bytes", "groups", "product_bytes", "without_products"];
LayerCost.fields = LayerCost.sig;
class HostTraining {
constructor(masters = 0, moments = 0, gradients = 0, stepping = 0, mapped = 0) { this.masters = masters; this.moments = moments; this.gradients = gradients; this.stepping = stepping; this.mapped = mapped; }
}
HostTraining.isClass = true;
HostTraining.sig = ["masters", "moments", "gradients", "stepping", "mapped"];
HostTraining.fields = HostTraining.sig;
class Overhead {
constructor(workspaces = 0, block = 1) { this.workspaces = workspaces; this.block = block; }
rounding(tensors, parts) {
const self = this;
if (py.eq(self.block, 1)) {
return 0;
}
return py.add(py.mul(self.block, parts), py.sum((function*(t3) { for (const t4 of t3) { const size = t4; if (py.gt(size, self.block)) { yield py.mod((-size), self.block); } } })(py.iter(tensors))));
}
}
Overhead.isClass = true;
Overhead.sig = ["workspaces", "block"];
Overhead.fields = Overhead.sig;
Overhead.prototype.rounding.sig = ["tensors", "parts"];
const NO_OVERHEAD = new Overhead();
class RowsInHost {
constructor(working_bytes, flight_bytes, host_bytes, chunk_bytes) { this.working_bytes = working_bytes; this.flight_bytes = flight_bytes; this.host_bytes = host_bytes; this.chunk_bytes = chunk_bytes; }
}
RowsInHost.isClass = true;
RowsInHost.sig = ["working_bytes", "flight_bytes", "host_bytes", "chunk_bytes"];
RowsInHost.fields = RowsInHost.sig;
class Demand {
constructor(layers, lowest = 0, outside_bytes = 0, buffer_bytes = 0, adapter_bytes = 0, working_bytes = 0, flight_bytes = 0, expanded_bytes = 0, boundary_bytes = 0, micro_boundary_bytes = 0, head_seconds = 0.0, outside_seconds = 0.0, gathered_bytes = 0, processes = 1, shared = false, training = new HostTraining(), pieces = 0, row_bytes = 0, overhead = NO_OVERHEAD, in_host = null, paged_bytes = 0) { this.layers = layers; this.lowest = lowest; this.outside_bytes = outside_bytes; this.buffer_bytes = buffer_bytes; this.adapter_bytes = adapter_bytes; this.working_bytes = working_bytes; this.flight_bytes = flight_bytes; this.expanded_bytes = expanded_bytes; this.boundary_bytes = boundary_bytes; this.micro_boundary_bytes = micro_boundary_bytes; this.head_seconds = head_seconds; this.outside_seconds = outside_seconds; this.gathered_bytes = gathered_bytes; this.processes = processes; this.shared = shared; this.training = training; this.pieces = pieces; this.row_bytes = row_bytes; this.overhead = overhead; this.in_host = in_host; this.paged_bytes = paged_bytes; }
get top() {
const self = this;
return py.sub(py.len(self.layers), 1);
}
get groups() { return py.once(this, 'groups', () => {
const self = this;
return py.tuple((function*(t5) { for (const t6 of t5) { const layer = t6; yield py.len(layer.groups); } })(py.iter(self.layers)));
}); }
get leased() { return py.once(this, 'leased', () => {
const self = this;
let layer_leases;
layer_leases = (() => { const made$ = []; for (const t7 of py.iter(py.enumerate(self.layers))) { const [index, layer] = py.list(t7); made$.push([index, py.sub(layer.slot_bytes, py.sum(layer.groups))]); } return made$; })();
return [...py.iter(layer_leases), ...py.iter((function*(t8) { for (const t10 of t8) { const [index, layer] = py.list(t10); for (const t9 of py.iter(layer.groups)) { const size = t9; yield [index, size]; } } })(py.iter(py.enumerate(self.layers))))];
}); }
total(what, numbers) {
const self = this;
let index, layer, nbytes, total_bytes;
total_bytes = 0;
for (const t11 of py.iter(py.map(((key) => py.item(self.leased, key)), numbers))) { ;[index, nbytes] = py.list(t11);
layer = py.item(self.layers, index);
total_bytes = py.add(total_bytes, (py.t(layer.groups) ? py.floordiv(py.mul(py.getattr(layer, what), nbytes), layer.slot_bytes) : py.getattr(layer, what)));
}
return total_bytes;
}
get visited_twice() {
const self = this;
return py.range(self.lowest, self.top);
}
get keeping() {
const self = this;
return py.range(self.lowest, (py.t(self.pieces) ? py.sub(py.len(self.layers), self.pieces) : self.top));
}
get fixed_bytes() {
const self = this;
let persistent_bytes, transient_bytes;
transient_bytes = py.add(py.add(py.add(py.bound(self, 'working_bytes'), self.flight_bytes), self.expanded_bytes), self.gathered_bytes);
persistent_bytes = py.add(py.add(py.add(self.outside_bytes, self.buffer_bytes), self.adapter_bytes), self.gradient_bytes);
return py.add(py.add(persistent_bytes, transient_bytes), self.overhead.workspaces);
}
get gradient_bytes() {
const self = this;
return py.mul(2, py.max.call({default: 0}, (function*(t12) { for (const t13 of t12) { const layer = t13; yield layer.gradient_bytes; } })(py.iter(self.layers))));
}
get host_copies() {
const self = this;
return (py.t(self.gathered_bytes) ? self.processes : 1);
}
}
Demand.isClass = true;
Demand.sig = ["layers", "lowest", "outside_bytes", "buffer_bytes", "adapter_bytes", "working_bytes", "flight_bytes", "expanded_bytes", "boundary_bytes", "micro_boundary_bytes", "head_seconds", "outside_seconds", "gathered_bytes", "processes", "shared", "training", "pieces", "row_bytes", "overhead", "in_host", "paged_bytes"];
Demand.fields = Demand.sig;
Demand.prototype.total.sig = ["what", "numbers"];
class Speeds {
constructor(disk, link = math.inf) { this.disk = disk; this.link = link; }
}
Speeds.isClass = true;
Speeds.sig = ["disk", "link"];
Speeds.fields = Speeds.sig;
class Phase {
constructor(compute, link, disk) { this.compute = compute; this.link = link; this.disk = disk; }
get seconds() {
const self = this;
return py.max(py.bound(self, 'compute'), self.link, self.disk);
}
}
Phase.isClass = true;
Phase.sig = ["compute", "link", "disk"];
Phase.fields = Phase.sig;
const saved_elsewhere = py.named(function(demand, allocation) {
let gone;
if (py.eq(allocation.saved_on, "device")) {
return new Map([]);
}
gone = py.sorted(py.intersection(allocation.saved, py.bound(demand, 'keeping')));
return new Map((() => { const made$ = []; for (const t14 of py.iter(gone)) { const index = t14; made$.push([index, py.add(py.item(demand.layers, index).saved_bytes, demand.boundary_bytes)]); } return made$; })());
}, ["demand", "allocation"]);
const rows_in_host = py.named(function(demand, allocation) {
return (py.eq(allocation.boundaries, "device") ? null : demand.in_host);
}, ["demand", "allocation"]);
const _away = py.named(function(demand, allocation) {
if (py.eq(allocation.boundaries, "device")) {
return 0;
}
return py.call(waiting_bytes, [demand, allocation]);
}, ["demand", "allocation"]);
const _read_again = py.named(function(demand, allocation) {
return ((py.call(rows_in_host, [demand, allocation]) == null) ? 0 : py.call(_away, [demand, allocation]));
}, ["demand", "allocation"]);
const waiting_bytes = py.named(function(demand, allocation) {
let count;
count = py.sub(py.len(py.bound(demand, 'keeping')), py.len(py.intersection(allocation.saved, py.bound(demand, 'keeping'))));
return py.mul(count, demand.boundary_bytes);
}, ["demand", "allocation"]);
const phases = py.named(function(demand, allocation, speeds) {
let _, again, disk_down, disk_up, down, in_memory, inputs, layers, link_down, link_up, loads_down, loads_up, moved, reads_down, reads_up, residents, saved, spilled, top, twice, up;
layers = demand.layers;
twice = demand.visited_twice;
top = py.item(layers, demand.top);
up = py.add(py.add(py.sum((function*(t15) { for (const t16 of t15) { const layer = t16; yield py.add(layer.expand, layer.forward); } })(py.iter(layers))), top.backward), demand.head_seconds);
down = py.sum((function*(t17) { for (const t18 of t17) { const index = t18; yield py.call(down_seconds, [demand, allocation, index]); } })(py.iter(twice)));
inputs = py.call(_away, [demand, allocation]);
saved = py.sum(py.values(py.call(saved_elsewhere, [demand, allocation])));
moved = py.add(inputs, saved);
spilled = py.add(py.mul(inputs, py.eq(allocation.boundaries, "disk")), py.mul(saved, py.eq(allocation.saved_on, "disk")));
residents = allocation.residents;
in_memory = py.or_(allocation.residents, allocation.host_cached);
;[_, loads_up, loads_down] = py.list(py.call(fetches, [demand.groups, allocation.slots, residents, demand.lowest]));
;[_, reads_up, reads_down] = py.list(py.call(fetches, [demand.groups, allocation.slots, in_memory, demand.lowest]));
link_up = py.div(py.max(demand.total("upload_bytes", loads_up), moved), speeds.link);
link_down = py.div(py.add(demand.total("upload_bytes", loads_down), moved), speeds.link);
link_down = py.max(link_down, py.div(py.sum((function*(t19) { for (const t20 of t19) { const layer = t20; yield layer.gradient_bytes; } })(py.iter(layers))), speeds.link));
disk_up = py.div(py.add(py.add(demand.row_bytes, demand.total("read_bytes", reads_up)), spilled), speeds.disk);
again = py.call(_read_again, [demand, allocation]);
link_down = py.add(link_down, py.div(again, speeds.link));
spilled = py.add(spilled, py.mul(again, py.eq(allocation.boundaries, "disk")));
disk_down = py.div(py.add(demand.total("read_bytes", reads_down), spilled), speeds.disk);
return [new Phase(up, link_up, disk_up), new Phase(down, link_down, disk_down)];
}, ["demand", "allocation", "speeds"]);
const crossover = py.named(function(demand, allocation, speeds, tokens) {
let needed, step_phases;
step_phases = py.call(phases, [py.replace(demand, {boundary_bytes: 0}), py.replace(allocation, {saved_on: "device"}), speeds]);
needed = (() => { const made$ = []; for (const t21 of py.iter(step_phases)) { const phase = t21; if (py.gt(py.bound(phase, 'compute'), 0)) { made$.push(py.div(py.max(phase.link, phase.disk), py.bound(phase, 'compute'))); } } return made$; })();
return py.either(py.mul(tokens, py.max.call({default: 0.0}, needed)), () => null);
}, ["demand", "allocation", "speeds", "tokens"]);
const down_seconds = py.named(function(demand, allocation, index) {
let again, layer;
layer = py.item(demand.layers, index);
again = py.sub(layer.recompute, (py.has(index, allocation.products) ? layer.product_seconds : 0.0));
return py.add(py.add(layer.expand, layer.backward), (py.has(index, allocation.saved) ? 0.0 : again));
}, ["demand", "allocation", "index"]);
const group_numbers = py.named(function(groups) {
let offsets;
offsets = [...py.iter(py.call(accumulate, [groups], {initial: py.len(groups)}))];
return new Map((() => { const made$ = []; for (const t22 of py.iter(py.enumerate(groups))) { const [index, count] = py.list(t22); if (py.t(count)) { made$.push([index, py.tuple(py.range(py.item(offsets, index), py.item(offsets, py.add(index, 1))))]); } } return made$; })());
}, ["groups"]);
const fetches = py.cached(py.named(function(groups, slots, in_memory, lowest) {
let excluded, first, layers, parts, step_order, then_up, up;
parts = py.call(group_numbers, [groups]);
layers = py.len(groups);
excluded = py.call(with_parts, [in_memory, parts]);
up = py.call(in_parts, [py.call(forward_order, [layers]), parts], {pinned: true});
step_order = py.call(in_parts, [py.call(training_order, [layers, lowest]), parts], {top_layer: py.sub(layers, 1), pinned: true});
first = py.call(fetched, [step_order, slots, excluded]);
then_up = py.call(fetched, [py.add(step_order, up), slots, excluded]);
return [first, py.slice(then_up, py.len(first), null, null), py.slice(py.call(fetched, [py.mul(step_order, 2), slots, excluded]), py.len(then_up), null, null)];
}, ["groups", "slots", "in_memory", "lowest"]));
const seconds = py.named(function(demand, allocation, speeds) {
let down, up;
;[up, down] = py.list(py.call(phases, [demand, allocation, speeds]));
return py.add(py.add(up.seconds, down.seconds), demand.outside_seconds);
}, ["demand", "allocation", "speeds"]);
class Traffic {
constructor(read, uploaded, downloaded) { this.read = read; this.uploaded = uploaded; this.downloaded = downloaded; }
}
Traffic.isClass = true;
Traffic.sig = ["read", "uploaded", "downloaded"];
Traffic.fields = Traffic.sig;
const traffic = py.named(function(demand, allocation, steps, rewritten) {
let back, gradients, in_memory, read, uploaded, waiting, weights;
in_memory = py.or_(allocation.residents, allocation.host_cached);
weights = py.named(function(stored_layers, what) {
let before, down, first, first_step, later, up;
;[first_step, up, down] = py.list(py.call(fetches, [demand.groups, allocation.slots, stored_layers, demand.lowest]));
;[first, later] = py.list((function*(t23) { for (const t24 of t23) { const numbers = t24; yield demand.total(what, numbers); } })(py.iter([first_step, (py.t(rewritten) ? first_step : py.add(up, down))])));
before = py.sum((function*(t25) { for (const t26 of t25) { const index = t26; yield py.getattr(py.item(demand.layers, index), what); } })(py.iter(stored_layers)));
return py.add(py.add(before, first), py.mul(py.sub(steps, 1), later));
}, ["stored_layers", "what"]);
read = py.add(py.add(demand.outside_bytes, py.call(weights, [in_memory, "read_bytes"], {})), py.mul(steps, demand.row_bytes));
if (py.t(demand.shared)) {
return new Traffic(read, 0, 0);
}
uploaded = py.add(demand.outside_bytes, py.call(weights, [allocation.residents, "upload_bytes"], {}));
waiting = py.add(py.call(_away, [demand, allocation]), py.sum(py.values(py.call(saved_elsewhere, [demand, allocation]))));
gradients = py.sum((function*(t27) { for (const t28 of t27) { const layer = t28; yield layer.gradient_bytes; } })(py.iter(demand.layers)));
back = py.add(waiting, py.call(_read_again, [demand, allocation]));
return new Traffic(read, py.add(uploaded, py.mul(steps, back)), py.mul(steps, py.add(gradients, waiting)));
}, ["demand", "allocation", "steps", "rewritten"]);
return {Allocation, Demand, HostTraining, LayerCost, NO_OVERHEAD, Overhead, Phase, RowsInHost, Speeds, Tier, Traffic, _away, _read_again, crossover, down_seconds, fetches, group_numbers, phases, rows_in_host, saved_elsewhere, seconds, traffic, waiting_bytes};
})();
const lema_plan_memory = (() => {
const boundaries_in_host = lema_activations_boundaries.boundaries_in_host;
const boundaries_on_device = lema_activations_boundaries.boundaries_on_device;
const graphs_in_host = lema_activations_stepstore.graphs_in_host;
const graphs_on_device = lema_activations_stepstore.graphs_on_device;
const Allocation = lema_plan_cost.Allocation;
const Demand = lema_plan_cost.Demand;
const rows_in_host = lema_plan_cost.rows_in_host;
const saved_elsewhere = lema_plan_cost.saved_elsewhere;
const waiting_bytes = lema_plan_cost.waiting_bytes;
const ring_bytes = lema_stream_ring.ring_bytes;
const OF_LAYERS = ["slots", "residents"];
const ADDED_TO = ["boundaries", "saved"];
const device_parts = py.named(function(demand, allocation) {
let rows, tensors;
rows = py.either(py.call(rows_in_host, [demand, allocation]), () => demand);
tensors = new Map([["slots", py.call(_ring, [demand, allocation], {skip_cached: demand.shared})], ["residents", py.sum((function*(t1) { for (const t2 of t1) { const index = t2; yield py.item(demand.layers, index).slot_bytes; } })(py.iter(allocation.residents)))], ["outside", py.add(demand.outside_bytes, demand.buffer_bytes)], ["adapters", demand.adapter_bytes], ["gradients", demand.gradient_bytes], ["working", py.bound(rows, 'working_bytes')], ["flight", rows.flight_bytes], ["expanded", demand.expanded_bytes], ["gathered", demand.gathered_bytes], ["boundaries", py.call(_boundaries_on_device, [demand, allocation])], ["saved", py.call(_saved_on_device, [demand, allocation])]]);
return new Map([...tensors, ["workspaces", py.call(_workspaces, [demand, allocation, tensors])]]);
}, ["demand", "allocation"]);
const host_parts = py.named(function(demand, allocation) {
let cached, count, in_host, rows_bytes, saved, tier, training, waiting;
tier = allocation.boundaries;
waiting = py.call(waiting_bytes, [demand, allocation]);
in_host = py.call(rows_in_host, [demand, allocation]);
rows_bytes = ((in_host == null) ? 0 : in_host.host_bytes);
saved = py.sum(py.values(py.call(saved_elsewhere, [demand, allocation])));
training = demand.training;
count = demand.processes;
cached = py.sum((function*(t3) { for (const t4 of t3) { const index = t4; yield py.item(demand.layers, index).slot_bytes; } })(py.iter(allocation.host_cached)));
return new Map([["ring", py.mul(count, py.call(_ring, [demand, allocation], {skip_cached: true}))], ["cached", py.mul(demand.host_copies, cached)], ["boundaries", py.mul(count, py.add(rows_bytes, py.call(boundaries_in_host, [tier, waiting, py.call(_largest_boundary, [demand, allocation])])))], ["keys", py.mul(count, demand.paged_bytes)], ["saved", py.mul(count, py.call(graphs_in_host, [allocation.saved_on, saved]))], ["masters", py.mul(count, training.masters)], ["moments", py.mul(count, training.moments)], ["waiting", py.mul(count, training.gradients)], ["stepping", py.mul(count, training.stepping)]]);
}, ["demand", "allocation"]);
const _ring = py.named(function(demand, allocation, skip_cached) {
let in_memory, through;
in_memory = py.or_(allocation.residents, (py.t(skip_cached) ? allocation.host_cached : py.frozenset()));
through = (() => { const made$ = []; for (const t5 of py.iter(demand.leased)) { const [index, nbytes] = py.list(t5); if (py.hasnot(index, in_memory)) { made$.push(nbytes); } } return made$; })();
return py.call(ring_bytes, [allocation.slots, through]);
}, ["demand", "allocation", "skip_cached"]);
const _boundaries_on_device = py.named(function(demand, allocation) {
let kept, largest, own_bytes, waiting, with_graphs;
waiting = py.call(waiting_bytes, [demand, allocation]);
kept = py.intersection(allocation.saved, py.bound(demand, 'keeping'));
with_graphs = py.sub(py.len(kept), py.len(py.call(saved_elsewhere, [demand, allocation])));
own_bytes = 0;
if (((py.call(rows_in_host, [demand, allocation]) == null) || !py.t(demand.shared))) {
largest = py.call(_largest_boundary, [demand, allocation]);
own_bytes = py.call(boundaries_on_device, [allocation.boundaries, waiting, largest]);
}
return py.add(own_bytes, py.mul(with_graphs, demand.boundary_bytes));
}, ["demand", "allocation"]);
const _largest_boundary = py.named(function(demand, allocation) {
let in_host;
in_host = py.call(rows_in_host, [demand, allocation]);
return ((in_host == null) ? demand.micro_boundary_bytes : in_host.chunk_bytes);
}, ["demand", "allocation"]);
const _saved_on_device = py.named(function(demand, allocation) {
let gone, layers, passing, staying;
layers = demand.layers;
gone = py.call(saved_elsewhere, [demand, allocation]);
staying = (() => { const made$ = []; for (const t6 of py.iter(py.sub(allocation.saved, py.keys(gone)))) { const index = t6; made$.push(py.item(layers, index).saved_bytes); } return made$; })();
staying = py.add(staying, (() => { const made$ = []; for (const t7 of py.iter(allocation.products)) { const index = t7; made$.push(py.item(layers, index).product_bytes); } return made$; })());
passing = (() => { const made$ = []; for (const t8 of py.iter(gone)) { const index = t8; made$.push(py.add(py.item(layers, index).micro_saved_bytes, demand.micro_boundary_bytes)); } return made$; })();
return py.call(graphs_on_device, [staying, passing]);
}, ["demand", "allocation"]);
const _workspaces = py.named(function(demand, allocation, tensors) {
let layer_sizes, num_parts, slot;
slot = py.max.call({default: 0}, (function*(t9) { for (const t10 of t9) { const [index, size] = py.list(t10); if (py.hasnot(index, allocation.residents)) { yield size; } } })(py.iter(demand.leased)));
layer_sizes = py.mul([slot], (py.t(slot) ? py.floordiv(py.item(tensors, "slots"), slot) : 0));
layer_sizes = py.add(layer_sizes, (() => { const made$ = []; for (const t11 of py.iter(allocation.residents)) { const index = t11; made$.push(py.item(demand.layers, index).slot_bytes); } return made$; })());
num_parts = py.sum((function*(t12) { for (const t13 of t12) { const part = t13; if ((py.has(part, ADDED_TO) || (py.t(py.item(tensors, part)) && py.hasnot(part, OF_LAYERS)))) { yield 1; } } })(py.iter(tensors)));
return py.add(demand.overhead.workspaces, demand.overhead.rounding(layer_sizes, num_parts));
}, ["demand", "allocation", "tensors"]);
return {ADDED_TO, OF_LAYERS, _boundaries_on_device, _largest_boundary, _ring, _saved_on_device, _workspaces, device_parts, host_parts};
})();
const lema_plan_budget = (() => {
const math = stubs.math;
const replace = stubs.replace;
const human_bytes = lema_config_units.human_bytes;
const MemoryLimitError = stubs.MemoryLimitError;
const Allocation = lema_plan_cost.Allocation;
const Demand = lema_plan_cost.Demand;
const Speeds = lema_plan_cost.Speeds;
const Tier = lema_plan_cost.Tier;
const seconds = lema_plan_cost.seconds;
const device_parts = lema_plan_memory.device_parts;
const host_parts = lema_plan_memory.host_parts;
const MARGIN = 1.1;
const _TIERS = ["device", "host", "disk"];
const spread = py.named(function(count, num_layers) {
if (!(py.le(0, count) && py.le(count, num_layers))) {
throw py.call(ValueError, [[py.format(count, ""), " residents out of ", py.format(num_layers, ""), " layers"].join('')]);
}
return py.tuple((function*(t1) { for (const t2 of t1) { const index = t2; yield py.floordiv(py.mul(py.add(py.mul(2, index), 1), num_layers), py.mul(2, count)); } })(py.iter(py.range(count))));
}, ["count", "num_layers"]);
const scattered = py.named(function(num_layers) {
let bits;
bits = py.max(1, py.bit_length(py.sub(num_layers, 1)));
return py.tuple(py.sorted.call({key: ((layer) => (py.int(py.slice([py.format(layer, ["0", py.format(bits, ""), "b"].join(''))].join(''), null, null, (-1)), 2)))}, py.range(num_layers)));
}, ["num_layers"]);
const solve = py.named(function(demand, speeds, num_slots, device_limit = null, host_limit = null, host_cache = "none", recompute = true, boundaries = null, saved_on = "device", stay = true, save = true, products = true) {
let bare, best, cautious, fitting, free_bytes, host_free_bytes, key, limited, product_layers, refused, saved, tiers, usable_tiers;
limited = (device_limit != null);
usable_tiers = py.tuple((function*(t3) { for (const t4 of t3) { const tier = t4; if ((py.ne(tier, "host") || !py.t(demand.shared))) { yield tier; } } })(py.iter(_TIERS)));
tiers = ((boundaries != null) ? [boundaries] : ((py.t(limited) && py.t(recompute)) ? usable_tiers : py.slice(usable_tiers, null, 1, null)));
cautious = new Speeds(py.div(speeds.disk, MARGIN), py.div(speeds.link, MARGIN));
fitting = [];
refused = [];
for (const t5 of py.iter(py.call(_candidates, [demand, num_slots, tiers, saved_on], {stay: py.both(limited, () => stay), recompute: recompute}))) { bare = t5;
if (py.eq(host_cache, "all")) {
bare = py.replace(bare, {host_cached: py.sub(py.frozenset(py.range(py.len(demand.layers))), bare.residents)});
}
free_bytes = py.call(_left, [device_limit, py.call(device_parts, [demand, bare])]);
host_free_bytes = py.call(_left, [host_limit, py.call(host_parts, [demand, bare])]);
if ((py.lt(free_bytes, 0) || py.lt(host_free_bytes, 0))) {
py.append(refused, bare);
continue;
}
if (py.eq(host_cache, "fill")) {
bare = py.replace(bare, {host_cached: py.frozenset(py.call(_cacheable, [demand, bare, host_limit]))});
}
if ((py.t(recompute) && py.t(save) && (device_limit != null))) {
;[saved, product_layers] = py.list(py.call(_saved_layers, [demand, bare, free_bytes], {products: products}));
bare = py.replace(bare, {saved: saved, products: product_layers});
}
key = [py.call(seconds, [demand, bare, cautious]), py.index(_TIERS, bare.boundaries), py.len(bare.residents)];
py.append(fitting, [key, bare]);
}
if (!py.t(fitting)) {
throw py.call(_nothing_fits, [demand, refused, device_limit, host_limit]);
}
best = py.item(py.min.call({key: ((entry) => (py.item(entry, 0)))}, fitting), 1);
return py.call(_without_surplus, [demand, cautious, best, host_limit], {may_stream: py.eq(host_cache, "fill")});
}, ["demand", "speeds", "num_slots", "device_limit", "host_limit", "host_cache", "recompute", "boundaries", "saved_on", "stay", "save", "products"]);
const _candidates = py.named(function*(demand, num_slots, tiers, saved_on, stay, recompute) {
let count, num_layers, residents, saved, saved_tier, tier;
;[saved, saved_tier] = py.list((py.t(recompute) ? [py.frozenset(), py.item(_TIERS, 0)] : [py.frozenset(py.bound(demand, 'keeping')), saved_on]));
num_layers = py.len(demand.layers);
for (const t6 of py.iter(py.range((py.t(stay) ? py.add(num_layers, 1) : 1)))) { count = t6;
residents = py.frozenset(py.call(spread, [count, num_layers]));
for (const t7 of py.iter(tiers)) { tier = t7;
yield py.call(Allocation, [num_slots, residents], {boundaries: tier, saved: saved, saved_on: saved_tier, pieces: demand.pieces, recompute: recompute});
}
}
}, ["demand", "num_slots", "tiers", "saved_on", "stay", "recompute"]);
const _left = py.named(function(limit, parts) {
return ((limit == null) ? math.inf : py.sub(limit, py.sum(py.values(parts))));
}, ["limit", "parts"]);
const _saved_layers = py.named(function(demand, bare, free_bytes, products) {
let _, activation_bytes, inputs, layers, part, product_layers, saved, saves;
inputs = (py.eq(bare.boundaries, "device") ? 0 : demand.boundary_bytes);
layers = new Map((() => { const made$ = []; for (const t8 of py.iter(py.call(scattered, [py.len(demand.layers)]))) { const index = t8; if (py.has(index, py.bound(demand, 'keeping'))) { made$.push([index, py.item(demand.layers, index)]); } } return made$; })());
layers = new Map((() => { const made$ = []; for (const t9 of py.iter(py.items(layers))) { const [index, layer] = py.list(t9); if (!py.t(layer.groups)) { made$.push([index, layer]); } } return made$; })());
activation_bytes = new Map((() => { const made$ = []; for (const t10 of py.iter(py.items(layers))) { const [index, layer] = py.list(t10); made$.push([index, py.add(layer.saved_bytes, inputs)]); } return made$; })());
part = new Map((() => { const made$ = []; for (const t11 of py.iter(py.items(layers))) { const [index, layer] = py.list(t11); if ((py.t(products) && py.t(layer.product_bytes))) { made$.push([index, layer.product_bytes]); } } return made$; })());
saves = py.sum((function*(t12) { for (const t13 of t12) { const index = t13; yield py.item(layers, index).product_seconds; } })(py.iter(part)));
if (py.le(py.mul(saves, py.sum(py.values(activation_bytes))), py.mul(py.sum((function*(t14) { for (const t15 of t14) { const layer = t15; yield layer.recompute; } })(py.iter(py.values(layers)))), py.sum(py.values(part))))) {
return [py.item(py.call(_fitting, [activation_bytes, free_bytes]), 0), py.frozenset()];
}
;[product_layers, free_bytes] = py.list(py.call(_fitting, [part, free_bytes]));
if (py.lt(py.len(product_layers), py.len(part))) {
return [py.frozenset(), product_layers];
}
;[saved, _] = py.list(py.call(_fitting, [new Map((() => { const made$ = []; for (const t16 of py.iter(py.items(activation_bytes))) { const [index, nbytes] = py.list(t16); made$.push([index, py.sub(nbytes, py.get(part, index, 0))]); } return made$; })()), free_bytes]));
return [saved, py.sub(product_layers, saved)];
}, ["demand", "bare", "free_bytes", "products"]);
const _fitting = py.named(function(sizes, free_bytes) {
let chosen, index, nbytes;
chosen = py.list();
for (const t17 of py.iter(py.items(sizes))) { ;[index, nbytes] = py.list(t17);
if (py.gt(nbytes, free_bytes)) {
break;
}
py.append(chosen, index);
free_bytes = py.sub(free_bytes, nbytes);
}
return [py.frozenset(chosen), free_bytes];
}, ["sizes", "free_bytes"]);
const _cacheable = py.named(function(demand, bare, limit) {
let chosen, free_bytes, index, streamed;
streamed = (() => { const made$ = []; for (const t18 of py.iter(py.call(scattered, [py.len(demand.layers)]))) { const index = t18; if (py.hasnot(index, bare.residents)) { made$.push(index); } } return made$; })();
if (py.ge(py.call(_left, [limit, py.call(host_parts, [demand, py.replace(bare, {host_cached: py.frozenset(streamed)})])]), 0)) {
return streamed;
}
free_bytes = py.call(_left, [limit, py.call(host_parts, [demand, bare])]);
chosen = [];
for (const t19 of py.iter(streamed)) { index = t19;
free_bytes = py.sub(free_bytes, py.mul(demand.host_copies, py.item(demand.layers, index).slot_bytes));
if (py.lt(free_bytes, 0)) {
break;
}
py.append(chosen, index);
}
return chosen;
}, ["demand", "bare", "limit"]);
const _without_surplus = py.named(function(demand, speeds, best, host_limit, may_stream) {
let fewer, layers, least, part;
for (const t20 of py.iter(py.add(py.mul(["host_cached"], may_stream), py.mul(["saved", "products"], best.recompute)))) { part = t20;
least = py.call(seconds, [demand, best, speeds]);
layers = py.getattr(best, part);
fewer = (function*(t21) { for (const t22 of t21) { const subset = t22; yield py.replace(best, {...py.object(py.dict(new Map([[part, subset]])))}); } })(py.iter(py.call(_beginnings, [demand, layers])));
fewer = (function*(t23) { for (const t24 of t23) { const allocation = t24; if (py.ge(py.call(_left, [host_limit, py.call(host_parts, [demand, allocation])]), 0)) { yield allocation; } } })(py.iter(fewer));
best = py.next((function*(t25) { for (const t26 of t25) { const allocation = t26; if (py.le(py.call(seconds, [demand, allocation, speeds]), least)) { yield allocation; } } })(py.iter(fewer)));
}
return best;
}, ["demand", "speeds", "best", "host_limit", "may_stream"]);
const _beginnings = py.named(function(demand, chosen) {
let ordered;
ordered = (() => { const made$ = []; for (const t27 of py.iter(py.call(scattered, [py.len(demand.layers)]))) { const index = t27; if (py.has(index, chosen)) { made$.push(index); } } return made$; })();
return (function*(t28) { for (const t29 of t28) { const count = t29; yield py.frozenset(py.slice(ordered, null, count, null)); } })(py.iter(py.range(py.add(py.len(ordered), 1))));
}, ["demand", "chosen"]);
const _nothing_fits = py.named(function(demand, refused, device_limit, host_limit) {
let adapter_bytes, adapter_hint, largest, needed, on_device, to_disk, usable;
on_device = py.item(py.min((function*(t30) { for (const t31 of t30) { const allocation = t31; yield [py.sum(py.values(py.call(device_parts, [demand, allocation]))), allocation.slots]; } })(py.iter(refused))), 0);
if (((device_limit != null) && py.gt(on_device, device_limit))) {
largest = py.max((function*(t32) { for (const t33 of t32) { const [_, nbytes] = py.list(t33); yield nbytes; } })(py.iter(demand.leased)));
adapter_bytes = py.call(human_bytes, [demand.adapter_bytes]);
adapter_hint = [", or lower lora_rank or exclude modules: what trains takes ", py.format(adapter_bytes, "")].join('');
return py.call(MemoryLimitError, [[py.format(py.call(human_bytes, [device_limit]), ""), " of device memory cannot hold the layer slots (", py.format(py.item(refused, 0).slots, ""), " of ", py.format(py.call(human_bytes, [largest]), ""), ") beside ", py.format(py.call(human_bytes, [demand.fixed_bytes]), ""), " of embeddings, head, adapters, optimizer state and one micro-batch in one layer"].join('')], {where: "device_memory", how: ["allow at least ", py.format(on_device, [","].join('')), " bytes (", py.format(py.call(human_bytes, [on_device]), ""), "), or lower micro_batch_size or prefetch_depth", py.format(py.mul(adapter_hint, py.gt(py.mul(2, demand.adapter_bytes), device_limit)), "")].join('')});
}
usable = (() => { const made$ = []; for (const t34 of py.iter(refused)) { const allocation = t34; if (py.ge(py.call(_left, [device_limit, py.call(device_parts, [demand, allocation])]), 0)) { made$.push(allocation); } } return made$; })();
needed = py.min((function*(t35) { for (const t36 of t35) { const allocation = t36; yield py.sum(py.values(py.call(host_parts, [demand, allocation]))); } })(py.iter(usable)));
to_disk = (py.t(py.any((function*(t37) { for (const t38 of t37) { const allocation = t38; yield py.eq(allocation.saved_on, "host"); } })(py.iter(usable)))) ? ", set activation_offloading: disk" : "");
return py.call(MemoryLimitError, [[py.format(needed, [","].join('')), " bytes of host memory are needed for weights and activations, ", py.format(py.either(host_limit, () => 0), [","].join('')), " are allowed"].join('')], {where: "host_memory", how: ["allow that much", py.format(to_disk, ""), ", use strategy: streaming, or lower prefetch_depth"].join('')});
}, ["demand", "refused", "device_limit", "host_limit"]);
return {MARGIN, _TIERS, _beginnings, _cacheable, _candidates, _fitting, _left, _nothing_fits, _saved_layers, _without_surplus, scattered, solve, spread};
})();
const lema_plan_machine = (() => {
const math = stubs.math;
const closing = stubs.closing;
const dataclass = stubs.dataclass;
const psutil = stubs.psutil;
const Backend = stubs.Backend;
const Exchange = stubs.Exchange;
const memory_available = stubs.memory_available;
const resident_fraction = stubs.resident_fraction;
const workspace_memory = stubs.workspace_memory;
const LemaConfig = stubs.LemaConfig;
const parse_memory = stubs.parse_memory;
const ConfigError = stubs.ConfigError;
const open_backend = stubs.open_backend;
const planned_parallel = stubs.planned_parallel;
const NO_OVERHEAD = lema_plan_cost.NO_OVERHEAD;
const Overhead = lema_plan_cost.Overhead;
const Speeds = lema_plan_cost.Speeds;
const GB = py.pow(10, 9);
const GIB = py.pow(2, 30);
class Machine {
constructor(name, device_memory, host_memory, speeds, half, single, memory = math.inf, launch = 0.0, exchange = math.inf, latency = 0.0, note = "", overhead = NO_OVERHEAD) { this.name = name; this.device_memory = device_memory; this.host_memory = host_memory; this.speeds = speeds; this.half = half; this.single = single; this.memory = memory; this.launch = launch; this.exchange = exchange; this.latency = latency; this.note = note; this.overhead = overhead; }
get shared() {
const self = this;
return math.isinf(self.speeds.link);
}
flops(itemsize) {
const self = this;
return (py.ge(itemsize, 4) ? self.single : self.half);
}
exchanging(work) {
const self = this;
return py.add(py.div(work.nbytes, self.exchange), py.mul(work.count, self.latency));
}
}
Machine.isClass = true;
Machine.sig = ["name", "device_memory", "host_memory", "speeds", "half", "single", "memory", "launch", "exchange", "latency", "note", "overhead"];
Machine.fields = Machine.sig;
Machine.prototype.flops.sig = ["itemsize"];
Machine.prototype.exchanging.sig = ["work"];
const TRN1 = "one of two cores; the speeds of its host link and between cores are guesses, not published";
const PROFILES = new Map((() => { const made$ = []; for (const t1 of py.iter([new Machine("t4", py.mul(15, GIB), py.mul(32, GB), new Speeds(3000000000.0, 12000000000.0), 25000000000000.0, 6000000000000.0, 160000000000.0, 0.0015), new Machine("4090", py.mul(24, GIB), py.mul(64, GB), new Speeds(7000000000.0, 25000000000.0), 140000000000000.0, 62000000000000.0, 500000000000.0, 0.0015), new Machine("h100", py.mul(80, GB), py.mul(256, GB), new Speeds(14000000000.0, 50000000000.0), 400000000000000.0, 50000000000000.0, 1700000000000.0, 0.0015), new Machine("h200", py.mul(139, GIB), py.mul(128, GIB), new Speeds(14000000000.0, 50000000000.0), 400000000000000.0, 50000000000000.0, 2400000000000.0, 0.0015), new Machine("trn1", py.mul(16, GIB), py.mul(32, GIB), new Speeds(2000000000.0, 12000000000.0), 65000000000000.0, 16000000000000.0, 200000000000.0, 0.0015, 50000000000.0, 5e-05, TRN1), new Machine("cpu", py.mul(24, GB), py.mul(24, GB), new Speeds(1100000000.0), 400000000000.0, 150000000000.0, 5000000000.0)])) { const machine = t1; made$.push([machine.name, machine]); } return made$; })());
class MachineState {
constructor(machine, host_available, speeds = "unknown", resident_fraction = 0.0, process_bytes = 0, device_free = null) { this.machine = machine; this.host_available = host_available; this.speeds = speeds; this.resident_fraction = resident_fraction; this.process_bytes = process_bytes; this.device_free = device_free; }
limits(device_memory, host_memory) {
const self = this;
let device, host;
device = self.machine.device_memory;
host = self.machine.host_memory;
if (py.eq(device_memory, "auto")) {
device = self.free(1);
}
return [((device_memory == null) ? device : py.call(parse_memory, [device_memory, device])), ((host_memory == null) ? self.host_available : py.call(parse_memory, [host_memory, host]))];
}
free(processes) {
const self = this;
if (py.t(self.machine.shared)) {
return py.floordiv(py.min(self.machine.device_memory, self.host_available), processes);
}
return ((self.device_free == null) ? self.machine.device_memory : self.device_free);
}
}
MachineState.isClass = true;
MachineState.sig = ["machine", "host_available", "speeds", "resident_fraction", "process_bytes", "device_free"];
MachineState.fields = MachineState.sig;
MachineState.prototype.limits.sig = ["device_memory", "host_memory"];
MachineState.prototype.free.sig = ["processes"];
const unknown_speeds = py.named(function(shared) {
return (py.t(shared) ? new Speeds(1.0) : new Speeds(1.0, 10.0));
}, ["shared"]);
return {GB, GIB, Machine, MachineState, PROFILES, TRN1, unknown_speeds};
})();
const lema_plan_work_workload = (() => {
const math = stubs.math;
const contextmanager = stubs.contextmanager;
const dataclass = stubs.dataclass;
const fields = stubs.fields;
const is_dataclass = stubs.is_dataclass;
const replace = stubs.replace;
const partial = stubs.partial;
const torch = stubs.torch;
const Tensor = stubs.Tensor;
const DataDependentOutputException = stubs.DataDependentOutputException;
const DynamicOutputShapeException = stubs.DynamicOutputShapeException;
const saved_tensors_hooks = stubs.saved_tensors_hooks;
const PreTrainedModel = stubs.PreTrainedModel;
const Exchange = stubs.Exchange;
const Parallel = stubs.Parallel;
const load = stubs.load;
const HeadCut = stubs.HeadCut;
const blocks = stubs.blocks;
const PiecedHead = stubs.PiecedHead;
const piece_passes = stubs.piece_passes;
const AdaptedLinears = stubs.AdaptedLinears;
const LemaError = stubs.LemaError;
const ModelError = stubs.ModelError;
const Split = stubs.Split;
const tensors_in = stubs.tensors_in;
const LayerCall = stubs.LayerCall;
const Prelude = stubs.Prelude;
const Tally = stubs.Tally;
const without_values = stubs.without_values;
const Lease = stubs.Lease;
const LayerBytes = stubs.LayerBytes;
class MicroBatch {
constructor(rows, length, forward_only = 0, settled = false, packed = false, chunk = null, host_keys = false, tile = null) { this.rows = rows; this.length = length; this.forward_only = forward_only; this.settled = settled; this.packed = packed; this.chunk = chunk; this.host_keys = host_keys; this.tile = tile; }
get tokens() {
const self = this;
return py.mul(self.rows, self.length);
}
get is_cut() {
const self = this;
return py.both((py.bound(self, 'chunk') != null), () => py.gt(self.length, py.bound(self, 'chunk')));
}
}
MicroBatch.isClass = true;
MicroBatch.sig = ["rows", "length", "forward_only", "settled", "packed", "chunk", "host_keys", "tile"];
MicroBatch.fields = MicroBatch.sig;
class LayerWork {
constructor(forward, recompute, backward, saved_bytes, working_bytes, forward_bytes, gradient_bytes, exchanges, reduced, product_bytes, product_flops, waiting_bytes = 0, keys_values_bytes = 0, handed_on_bytes = 0, key_gradient_bytes = 0, paged_bytes = 0, chunk_bytes = 0, top_bytes = 0, square_flops = 0, launches = 1) { this.forward = forward; this.recompute = recompute; this.backward = backward; this.saved_bytes = saved_bytes; this.working_bytes = working_bytes; this.forward_bytes = forward_bytes; this.gradient_bytes = gradient_bytes; this.exchanges = exchanges; this.reduced = reduced; this.product_bytes = product_bytes; this.product_flops = product_flops; this.waiting_bytes = waiting_bytes; this.keys_values_bytes = keys_values_bytes; this.handed_on_bytes = handed_on_bytes; this.key_gradient_bytes = key_gradient_bytes; this.paged_bytes = paged_bytes; this.chunk_bytes = chunk_bytes; this.top_bytes = top_bytes; this.square_flops = square_flops; this.launches = launches; }
at_once(times) {
const self = this;
return py.add(py.round(py.mul(py.max(times, 1.0), self.waiting_bytes)), py.bound(self, 'working_bytes'));
}
}
LayerWork.isClass = true;
LayerWork.sig = ["forward", "recompute", "backward", "saved_bytes", "working_bytes", "forward_bytes", "gradient_bytes", "exchanges", "reduced", "product_bytes", "product_flops", "waiting_bytes", "keys_values_bytes", "handed_on_bytes", "key_gradient_bytes", "paged_bytes", "chunk_bytes", "top_bytes", "square_flops", "launches"];
LayerWork.fields = LayerWork.sig;
LayerWork.prototype.at_once.sig = ["times"];
class HeadWork {
constructor(flops, working_bytes, exchange, waiting_bytes = 0) { this.flops = flops; this.working_bytes = working_bytes; this.exchange = exchange; this.waiting_bytes = waiting_bytes; }
}
HeadWork.isClass = true;
HeadWork.sig = ["flops", "working_bytes", "exchange", "waiting_bytes"];
HeadWork.fields = HeadWork.sig;
class Workload {
constructor(kinds, works, head, hidden_bytes, call_bytes, prelude_bytes, state_bytes, starts_below, entered, pieces = null, in_host = null, chunk_bytes = 0) { this.kinds = kinds; this.works = works; this.head = head; this.hidden_bytes = hidden_bytes; this.call_bytes = call_bytes; this.prelude_bytes = prelude_bytes; this.state_bytes = state_bytes; this.starts_below = starts_below; this.entered = entered; this.pieces = pieces; this.in_host = in_host; this.chunk_bytes = chunk_bytes; }
of(layer) {
const self = this;
return py.item(self.works, py.item(self.kinds, layer));
}
get paged_bytes() {
const self = this;
return py.max((function*(t1) { for (const t2 of t1) { const work = t2; yield work.paged_bytes; } })(py.iter(self.works)));
}
working_bytes(times) {
const self = this;
let top;
top = py.add(self.of(py.sub(py.len(self.kinds), 1)).forward_bytes, self.hidden_bytes);
return self.most(py.add(top, py.bound(self.head, 'working_bytes')), times);
}
in_pieces(times) {
const self = this;
let waiting_bytes;
;
waiting_bytes = py.mul(py.sub(py.max(times, 1.0), 1), py.sub(self.pieces.waiting_bytes, self.hidden_bytes));
return self.most(py.round(py.add(py.bound(self.pieces, 'working_bytes'), waiting_bytes)), times);
}
most(head_bytes, times) {
const self = this;
let at_head, at_top, to_come, top;
to_come = py.sum((function*(t3) { for (const t4 of t3) { const layer = t4; yield self.of(layer).gradient_bytes; } })(py.iter(py.range(py.len(self.kinds)))));
top = self.of(py.sub(py.len(self.kinds), 1));
at_head = py.add(py.sub(head_bytes, to_come), py.round(py.mul(py.max(times, 1.0), top.waiting_bytes)));
at_top = py.add(top.at_once(times), top.top_bytes);
return py.max(self.prelude_bytes, at_head, at_top, ...py.iter((function*(t5) { for (const t6 of t5) { const work = t6; yield work.at_once(times); } })(py.iter(self.works))));
}
}
Workload.isClass = true;
Workload.sig = ["kinds", "works", "head", "hidden_bytes", "call_bytes", "prelude_bytes", "state_bytes", "starts_below", "entered", "pieces", "in_host", "chunk_bytes"];
Workload.fields = Workload.sig;
Workload.prototype.of.sig = ["layer"];
Workload.prototype.working_bytes.sig = ["times"];
Workload.prototype.in_pieces.sig = ["times"];
Workload.prototype.most.sig = ["head_bytes", "times"];
const grown = py.named(function(first, second, factor) {
let description, double, kind, result, start;
start = first;
double = second;
result = start;
if (py.t(py.isinstance(start, py.tuple))) {
result = py.tuple((function*(t7) { for (const t8 of t7) { const pair = t8; yield py.call(grown, [...py.iter(pair), factor]); } })(py.iter(py.zip.call({strict: true}, start, double))));
} else {
if (py.t(py.call(is_dataclass, [start]))) {
kind = py.type(start);
result = py.call(kind, [...py.iter((function*(t9) { for (const t10 of t9) { const part = t10; yield py.call(grown, [py.getattr(start, part.name), py.getattr(double, part.name), factor]); } })(py.iter(py.call(fields, [start]))))], {});
} else {
if ((py.type(start) === py.int)) {
result = py.round(py.add(start, py.mul(py.sub(factor, 1), py.sub(double, start))));
}
}
}
description = result;
return description;
}, ["first", "second", "factor"]);
return {HeadWork, LayerWork, MicroBatch, Workload, grown};
})();
const lema_plan_work_step = (() => {
const astuple = stubs.astuple;
const dataclass = stubs.dataclass;
const replace = stubs.replace;
const chunks_on_device = lema_activations_chunks_copies.chunks_on_device;
const Exchange = stubs.Exchange;
const LemaConfig = stubs.LemaConfig;
const OBJECTIVES = stubs.OBJECTIVES;
const dealt = stubs.dealt;
const objective_of = stubs.objective_of;
const padding_of = stubs.padding_of;
const ConfigError = stubs.ConfigError;
const Demand = lema_plan_cost.Demand;
const LayerCost = lema_plan_cost.LayerCost;
const RowsInHost = lema_plan_cost.RowsInHost;
const Machine = lema_plan_machine.Machine;
const TrainedBytes = stubs.TrainedBytes;
const MicroBatch = lema_plan_work_workload.MicroBatch;
const Workload = lema_plan_work_workload.Workload;
const LayerBytes = stubs.LayerBytes;
const PRODUCTS = 2;
class StepShape {
constructor(micro_batch, num_rows) { this.micro_batch = micro_batch; this.num_rows = num_rows; }
get tokens() {
const self = this;
return py.mul(self.num_rows, self.micro_batch.length);
}
get num_micro_batches() {
const self = this;
return py.div(self.num_rows, self.micro_batch.rows);
}
}
StepShape.isClass = true;
StepShape.sig = ["micro_batch", "num_rows"];
StepShape.fields = StepShape.sig;
class LayerSeconds {
constructor(forward = 0.0, recompute = 0.0, backward = 0.0, expand = 0.0, without_products = 0.0) { this.forward = forward; this.recompute = recompute; this.backward = backward; this.expand = expand; this.without_products = without_products; }
times(factor) {
const self = this;
let _, backward, forward, recompute, without_products;
;[forward, recompute, backward, _, without_products] = py.list((function*(t1) { for (const t2 of t1) { const duration = t2; yield py.mul(factor, duration); } })(py.iter(py.call(astuple, [self]))));
return new LayerSeconds(forward, recompute, backward, self.expand, without_products);
}
}
LayerSeconds.isClass = true;
LayerSeconds.sig = ["forward", "recompute", "backward", "expand", "without_products"];
LayerSeconds.fields = LayerSeconds.sig;
LayerSeconds.prototype.times.sig = ["factor"];
class Timings {
constructor(layers, head, prelude = 0.0, optimizer = 0.0) { this.layers = layers; this.head = head; this.prelude = prelude; this.optimizer = optimizer; }
times(factor) {
const self = this;
let layers;
layers = py.tuple((function*(t3) { for (const t4 of t3) { const layer = t4; yield layer.times(factor); } })(py.iter(self.layers)));
return py.replace(self, {layers: layers, head: py.mul(factor, self.head), prelude: py.mul(factor, self.prelude)});
}
}
Timings.isClass = true;
Timings.sig = ["layers", "head", "prelude", "optimizer"];
Timings.fields = Timings.sig;
Timings.prototype.times.sig = ["factor"];
const step_shape = py.named(function(config, positions, processes = 1, parts = 1) {
let at_once, example_rows, length, num_rows, rows, share, step_tokens, tokens;
length = py.call(padding_of, [config, parts, positions]).longest(config);
tokens = py.call(tokens_at_once, [config, length]);
example_rows = py.call(rows_each, [config]);
at_once = ((config.micro_batch_size == null) ? null : py.max(1, py.floordiv(config.micro_batch_size, example_rows)));
share = py.mul(example_rows, py.sum(py.map(py.len, py.call(dealt, [py.mul([1], config.batch_size), 0, processes, at_once]))));
num_rows = py.mul(share, config.gradient_accumulation_steps);
if ((tokens == null)) {
return new StepShape(py.call(micro_batch_of, [config, py.min(py.either(config.micro_batch_size, () => share), share), length]), num_rows);
}
rows = (-py.floordiv((-tokens), length));
if ((config.tokens_per_step != null)) {
step_tokens = (py.eq(config.tokens_per_step, "auto") ? tokens : config.tokens_per_step);
num_rows = (-py.floordiv(py.mul((-4), step_tokens), py.mul(py.mul(3, length), processes)));
}
if (py.gt(processes, 1)) {
num_rows = py.add(num_rows, rows);
}
return new StepShape(py.call(micro_batch_of, [config, py.min(rows, num_rows), length]), num_rows);
}, ["config", "positions", "processes", "parts"]);
const tokens_at_once = py.named(function(config, length) {
let how, tokens, what;
tokens = config.micro_batch_tokens;
if (((tokens != null) && py.lt(tokens, length))) {
what = ["a row may have ", py.format(length, [","].join('')), " tokens, and a micro-batch ", py.format(tokens, [","].join(''))].join('');
how = ["set it to ", py.format(length, ""), " or more, lower max_length, or leave it out"].join('');
throw py.call(ConfigError, [what], {where: "micro_batch_tokens", how: how});
}
return (((tokens == null) && (config.tokens_per_step != null)) ? length : tokens);
}, ["config", "length"]);
const micro_batch_of = py.named(function(config, rows, length) {
let at_once, more, objective;
objective = py.call(objective_of, [config]);
at_once = new Map([["chunk", config.chunk_tokens], ["tile", config.tile_tokens], ["host_keys", py.eq(config.keys_values, "host")]]);
if ((objective == null)) {
return py.call(MicroBatch, [rows, length], {packed: py.bool(config.packing), ...py.object(at_once)});
}
more = py.add(objective.reference, py.mul(2, objective.mismatched));
return py.call(MicroBatch, [rows, length, more], {settled: true, ...py.object(at_once)});
}, ["config", "rows", "length"]);
const rows_each = py.named(function(config) {
return (py.eq(py.item(OBJECTIVES, config.objective).examples, "pairs") ? 2 : 1);
}, ["config"]);
const by_arithmetic = py.named(function(workload, layers, machine, itemsize) {
let again, back, expand, first, flops, forward, head, kind, layer_seconds, once, parts, reduced, speed, without_products, work;
speed = machine.flops(itemsize);
layer_seconds = [];
for (const t5 of py.iter(py.enumerate(workload.works))) { ;[kind, work] = py.list(t5);
first = py.item(layers, py.index(workload.kinds, kind));
expand = (py.t(first.expansions) ? py.div(py.add(first.nbytes, first.expanded_bytes), py.bound(machine, 'memory')) : 0.0);
flops = [work.forward, work.recompute, work.backward, py.max(0, py.sub(work.recompute, work.product_flops))];
parts = py.zip.call({strict: true}, flops, [...py.iter(work.exchanges), py.item(work.exchanges, 1)]);
;[forward, again, back, without_products] = py.list((function*(t6) { for (const t7 of t6) { const [operations, sent] = py.list(t7); yield py.add(py.max(py.div(operations, speed), py.mul(work.launches, machine.launch)), machine.exchanging(sent)); } })(py.iter(parts)));
py.append(layer_seconds, new LayerSeconds(forward, again, back, expand, without_products));
}
reduced = (() => { const made$ = []; for (const t8 of py.iter(py.range(py.len(layers)))) { const layer = t8; made$.push(workload.of(layer).reduced); } return made$; })();
once = py.call(Exchange, [py.max((function*(t9) { for (const t10 of t9) { const exchange = t10; yield exchange.count; } })(py.iter(reduced))), py.sum((function*(t11) { for (const t12 of t11) { const exchange = t12; yield exchange.nbytes; } })(py.iter(reduced)))]);
head = py.add(py.div(py.bound(workload.head, 'flops'), speed), machine.exchanging(workload.head.exchange));
return new Timings(py.tuple(layer_seconds), head, machine.exchanging(workload.entered), machine.exchanging(once));
}, ["workload", "layers", "machine", "itemsize"]);
const demand_of = py.named(function(layers, workload, timings, shape, outside_bytes, adapter_bytes, lowest, shared, trained = null, pieces = [], groups = null) {
let costs, demand, forward, gradients, index, kind, layer, micro, parts, product, products, saved, seconds, sizes, spent, times, uploaded;
times = ((shape == null) ? 0.0 : shape.num_micro_batches);
costs = [];
for (const t13 of py.iter(py.enumerate(layers))) { ;[index, layer] = py.list(t13);
kind = ((workload == null) ? 0 : py.item(workload.kinds, index));
spent = ((timings == null) ? new LayerSeconds() : py.item(timings.layers, kind).times(times));
saved = ((workload == null) ? 0 : py.round(py.mul(times, py.item(workload.works, kind).saved_bytes)));
parts = py.get(py.either(groups, () => new Map([])), index, [layer.nbytes]);
uploaded = ((py.t(shared) || py.gt(py.len(parts), 1)) ? py.sum(parts) : layer.upload_bytes);
sizes = [py.sum(parts), layer.read_bytes, uploaded, saved];
forward = py.mul(spent.forward, ((shape == null) ? 1 : py.add(1, shape.micro_batch.forward_only)));
seconds = [spent.expand, forward, spent.recompute, spent.backward];
micro = ((workload == null) ? 0 : py.min(saved, py.item(workload.works, kind).saved_bytes));
gradients = ((trained == null) ? 0 : py.item(trained.layers, index).nbytes);
products = ((workload == null) ? 0 : py.round(py.mul(times, py.item(workload.works, kind).product_bytes)));
py.append(costs, new LayerCost(...py.iter(sizes), ...py.iter(seconds), micro, gradients, py.tuple(py.slice(parts, 1, null, null)), products, spent.without_products));
}
product = ((timings == null) ? 0.0 : py.div(py.mul(times, timings.head), PRODUCTS));
costs = py.add(costs, py.call(_piece_costs, [pieces, product], {shared: shared}));
demand = py.call(Demand, [py.tuple(costs)], {lowest: lowest, pieces: py.len(pieces), outside_bytes: outside_bytes, adapter_bytes: adapter_bytes, expanded_bytes: py.max((function*(t14) { for (const t15 of t14) { const layer = t15; yield layer.expanded_bytes; } })(py.iter(layers))), shared: shared});
if (((workload == null) || (shape == null))) {
return demand;
}
return py.call(_with_activations, [demand, workload, timings, shape]);
}, ["layers", "workload", "timings", "shape", "outside_bytes", "adapter_bytes", "lowest", "shared", "trained", "pieces", "groups"]);
const _piece_costs = py.named(function(pieces, product, shared) {
let costs, part, piece, seconds, uploaded;
costs = [];
for (const t16 of py.iter(pieces)) { piece = t16;
part = py.div(py.mul(product, piece.nbytes), py.sum((function*(t17) { for (const t18 of t17) { const head_piece = t18; yield head_piece.nbytes; } })(py.iter(pieces))));
seconds = [0.0, part, part, part];
uploaded = (py.t(shared) ? piece.nbytes : piece.upload_bytes);
py.append(costs, new LayerCost(piece.nbytes, piece.read_bytes, uploaded, 0, ...py.iter(seconds)));
}
return costs;
}, ["pieces", "product", "shared"]);
const _with_activations = py.named(function(demand, workload, timings, shape) {
let batch, chunk_bytes, copied, extra_bytes, head_seconds, hidden, in_host, own_bytes, states, times;
times = shape.num_micro_batches;
batch = shape.micro_batch;
hidden = py.round(py.mul(times, workload.hidden_bytes));
demand = py.replace(demand, {lowest: (py.t(workload.starts_below) ? 0 : demand.lowest)});
states = py.mul(py.mul(py.len(py.bound(demand, 'keeping')), workload.state_bytes), demand.shared);
extra_bytes = py.add(workload.call_bytes, states);
head_seconds = ((timings == null) ? 0.0 : py.mul(times, timings.head));
if (py.t(demand.pieces)) {
head_seconds = py.div(head_seconds, py.mul(PRODUCTS, demand.pieces));
} else {
extra_bytes = py.add(extra_bytes, workload.of(demand.top).gradient_bytes);
}
head_seconds = py.mul(head_seconds, py.add(1, py.div(batch.forward_only, 3)));
if (((py.t(batch.settled) || py.t(batch.is_cut)) && (timings != null))) {
head_seconds = py.add(head_seconds, py.mul(times, py.item(timings.layers, py.item(workload.kinds, (-1))).forward));
}
in_host = null;
if (((workload.in_host != null) && !py.t(demand.pieces))) {
own_bytes = py.add(py.sub(extra_bytes, workload.call_bytes), workload.in_host.call_bytes);
chunk_bytes = workload.in_host.chunk_bytes;
copied = (py.t(demand.shared) ? 0 : py.call(chunks_on_device, [chunk_bytes]));
in_host = py.call(RowsInHost, [workload.in_host.working_bytes(times)], {flight_bytes: py.add(py.round(py.mul(times, own_bytes)), copied), host_bytes: py.add(hidden, py.min(hidden, workload.hidden_bytes)), chunk_bytes: chunk_bytes});
}
return py.replace(demand, {in_host: in_host, paged_bytes: workload.paged_bytes, working_bytes: (py.t(demand.pieces) ? workload.in_pieces(times) : workload.working_bytes(times)), flight_bytes: py.add(py.sub(py.mul(py.add(2, batch.forward_only), hidden), py.min(hidden, workload.hidden_bytes)), py.round(py.mul(times, extra_bytes))), boundary_bytes: hidden, micro_boundary_bytes: py.min(hidden, workload.hidden_bytes), head_seconds: head_seconds, outside_seconds: ((timings == null) ? 0.0 : py.add(py.mul(times, timings.prelude), timings.optimizer))});
}, ["demand", "workload", "timings", "shape"]);
return {LayerSeconds, PRODUCTS, StepShape, Timings, _piece_costs, _with_activations, by_arithmetic, demand_of, micro_batch_of, rows_each, step_shape, tokens_at_once};
})();
const lema_plan_allocate = (() => {
const math = stubs.math;
const suppress = stubs.suppress;
const replace = stubs.replace;
const partial = stubs.partial;
const Replicas = stubs.Replicas;
const LemaConfig = stubs.LemaConfig;
const MemoryStrategy = stubs.MemoryStrategy;
const human_bytes = lema_config_units.human_bytes;
const parse_memory = stubs.parse_memory;
const MemoryLimitError = stubs.MemoryLimitError;
const Blueprint = stubs.Blueprint;
const MARGIN = lema_plan_budget.MARGIN;
const solve = lema_plan_budget.solve;
const Allocation = lema_plan_cost.Allocation;
const Demand = lema_plan_cost.Demand;
const Speeds = lema_plan_cost.Speeds;
const Tier = lema_plan_cost.Tier;
const seconds = lema_plan_cost.seconds;
const StepShape = lema_plan_work_step.StepShape;
const gathered_bytes = stubs.gathered_bytes;
const part_bytes = stubs.part_bytes;
const of_one_process = py.named(function(demand, replicas, sharded) {
let gathered, layer, layers, part, size;
demand = py.replace(demand, {processes: replicas.local_size});
size = replicas.size;
if ((!py.t(sharded) || py.eq(size, 1))) {
return demand;
}
layers = [];
for (const t1 of py.iter(demand.layers)) { layer = t1;
part = py.call(part_bytes, [layer.slot_bytes, size]);
py.append(layers, py.replace(layer, {slot_bytes: part, upload_bytes: part, read_bytes: math.ceil(py.div(layer.read_bytes, size))}));
}
gathered = py.call(gathered_bytes, [(() => { const made$ = []; for (const t2 of py.iter(layers)) { const layer = t2; made$.push(layer.slot_bytes); } return made$; })(), size]);
return py.replace(demand, {layers: py.tuple(layers), gathered_bytes: gathered});
}, ["demand", "replicas", "sharded"]);
const DEPTHS = [2, 1];
const WIDE = 8;
const CACHED = 0.5;
const whether_recomputed = py.named(function(config) {
let chunk;
if ((config.context_parallel_size != null)) {
return true;
}
chunk = config.chunk_tokens;
if (((chunk != null) && ((config.max_length == null) || py.gt(config.max_length, chunk)))) {
return true;
}
if (py.ne(config.gradient_checkpointing, "auto")) {
return config.gradient_checkpointing;
}
if ((py.eq(config.activation_offloading, "hidden_states") || py.has(config.boundary_activations, ["host", "disk"]))) {
return true;
}
return ((config.offloading_tier == null) ? null : false);
}, ["config"]);
const layers_stay = py.named(function(config, demand, free) {
let unlimited;
unlimited = py.both(py.eq(config.device_memory, "auto"), () => demand.shared);
return py.either((!py.t(unlimited)), () => py.gt(py.sum((function*(t3) { for (const t4 of t3) { const layer = t4; yield layer.read_bytes; } })(py.iter(demand.layers))), py.mul(CACHED, free)));
}, ["config", "demand", "free"]);
const allocated = py.named(function(config, demand, speeds, device_total, host_total, host_available, resident_fraction = 0.0, device_free = null) {
let alone, available, boundaries, device_limit, device_memory, error, fixed_bytes, free, host_limit, recompute, resident, solved, spent, stay, taken, tier;
host_limit = ((config.host_memory == null) ? null : py.call(parse_memory, [config.host_memory, host_total]));
resident = (config.strategy === MemoryStrategy.RESIDENT);
tier = config.offloading_tier;
device_memory = config.device_memory;
free = ((device_free == null) ? device_total : device_free);
free = (py.t(demand.shared) ? py.call(_of_host, [demand, py.min(device_total, host_available), host_limit, resident]) : free);
if (py.eq(device_memory, "auto")) {
device_limit = ((py.t(free) && !py.t(resident_fraction)) ? py.call(parse_memory, [device_memory, free]) : null);
} else {
device_limit = ((device_memory == null) ? null : py.call(parse_memory, [device_memory, device_total]));
resident_fraction = py.mul(resident_fraction, (device_memory == null));
}
alone = (!(py.t(demand.shared) && py.t(resident) && (device_limit == null)));
fixed_bytes = (py.t(alone) ? 0 : py.mul(demand.processes, py.sub(demand.fixed_bytes, demand.outside_bytes)));
recompute = py.call(whether_recomputed, [config]);
stay = py.either(py.bool(resident_fraction), () => py.call(layers_stay, [config, demand, free]));
boundaries = (py.eq(config.boundary_activations, "auto") ? null : config.boundary_activations);
boundaries = (((recompute === false) || (tier == null)) ? boundaries : tier);
solved = py.named(function(depth, again, saved_on, asked = true) {
return py.call(solve, [...py.iter([demand, speeds, py.add(depth, 1)])], {device_limit: (py.t(asked) ? device_limit : py.int(py.mul(resident_fraction, free))), host_limit: ((host_limit == null) ? py.max(0, py.sub(host_available, fixed_bytes)) : host_limit), host_cache: (py.t(resident) ? "all" : ((host_limit == null) ? "none" : "fill")), recompute: again, boundaries: (py.t(asked) ? boundaries : py.either(boundaries, () => "device")), saved_on: saved_on, stay: stay, save: py.either((recompute == null), () => py.ne(device_memory, "auto")), products: (!py.t(config.torch_compile))});
}, ["depth", "again", "saved_on", "asked"]);
spent = py.named(function(depth) {
let again, saved_on;
if (((recompute != null) || (device_limit == null))) {
again = (recompute !== false);
saved_on = py.either(tier, () => "device");
if (((device_limit == null) && py.t(resident_fraction))) {
try {
return py.call(solved, [depth, again, saved_on], {asked: false});
} catch (caught) { if (!(caught instanceof MemoryLimitError)) { throw caught; } }
}
return py.call(solved, [depth, again, saved_on], {});
}
return py.call(_least_recomputed, [demand, speeds, py.call(partial, [solved, depth])], {stay: stay});
}, ["depth"]);
try {
return py.call(_deepest, [((config.prefetch_depth == null) ? DEPTHS : [config.prefetch_depth]), spent]);
}
catch (caught) {
if (caught instanceof MemoryLimitError) {
error = caught;
if ((py.eq(error.where, "host_memory") && (host_limit == null))) {
taken = [", less ", py.format(py.call(human_bytes, [fixed_bytes]), ""), " for what trains and is computed"].join('');
available = ["memory available on this machine, ", py.format(py.call(human_bytes, [host_available]), "")].join('');
error.locate((py.t(fixed_bytes) ? py.add(available, taken) : available));
} else {
if ((py.eq(error.where, "device_memory") && py.eq(device_memory, "auto"))) {
error.locate(["free device memory, ", py.format(py.call(human_bytes, [free]), "")].join(''));
}
}
throw caught;
} else
{ throw caught; }
}
}, ["config", "demand", "speeds", "device_total", "host_total", "host_available", "resident_fraction", "device_free"]);
const _of_host = py.named(function(demand, available, host_limit, resident) {
let cached_bytes, free, weights;
weights = py.sum((function*(t6) { for (const t7 of t6) { const layer = t7; yield layer.slot_bytes; } })(py.iter(demand.layers)));
free = py.floordiv(available, demand.processes);
cached_bytes = py.floordiv(py.mul(demand.host_copies, weights), demand.processes);
return py.max(1, py.sub(free, (py.t(resident) ? cached_bytes : py.min(py.either(host_limit, () => 0), cached_bytes, py.floordiv(free, 2)))));
}, ["demand", "available", "host_limit", "resident"]);
const _deepest = py.named(function(depths, spent) {
let depth;
for (const t8 of py.iter(py.slice(depths, null, (-1), null))) { depth = t8;
try {
return py.call(spent, [depth], {});
} catch (caught) { if (!(caught instanceof MemoryLimitError)) { throw caught; } }
}
return py.call(spent, [py.item(depths, (-1))], {});
}, ["depths", "spent"]);
const _least_recomputed = py.named(function(demand, speeds, solved, stay) {
let again, allocations, best, candidates, cautious, saved_on, timed;
allocations = [];
timed = py.any((function*(t9) { for (const t10 of t9) { const layer = t10; yield layer.recompute; } })(py.iter(demand.layers)));
candidates = [[false, "device"], [true, "device"], [false, "host"]];
for (const t11 of py.iter(py.slice(candidates, null, ((py.t(timed) && !py.t(demand.shared)) ? 3 : 2), null))) { ;[again, saved_on] = py.list(t11);
try {
py.append(allocations, py.call(solved, [again, saved_on], {}));
if ((!py.t(again) && (!py.t(timed) || !py.t(stay) || py.eq(py.len(py.item(allocations, 0).residents), py.len(demand.layers))))) {
break;
}
} catch (caught) { if (!(caught instanceof MemoryLimitError)) { throw caught; } }
}
if (!py.t(allocations)) {
return py.call(solved, [true, "device"], {});
}
cautious = new Speeds(py.div(speeds.disk, MARGIN), py.div(speeds.link, MARGIN));
best = (py.t(timed) ? py.min.call({key: ((allocation) => (py.call(seconds, [demand, allocation, cautious])))}, allocations) : py.item(allocations, 0));
return ((py.t(timed) || !py.t(best.recompute)) ? best : py.replace(best, {saved: py.frozenset(), products: py.frozenset()}));
}, ["demand", "speeds", "solved", "stay"]);
const untimed = py.named(function(demand) {
let layers;
layers = py.tuple((function*(t12) { for (const t13 of t12) { const layer = t13; yield py.replace(layer, {expand: 0.0, forward: 0.0, recompute: 0.0, backward: 0.0}); } })(py.iter(demand.layers)));
return py.replace(demand, {layers: layers, head_seconds: 0.0, outside_seconds: 0.0});
}, ["demand"]);
const surely_fits = stubs.surely_fits;
const _most_heads = stubs._most_heads;
return {CACHED, DEPTHS, WIDE, _deepest, _least_recomputed, _most_heads, _of_host, allocated, layers_stay, of_one_process, surely_fits, untimed, whether_recomputed};
})();
const lema_plan_simulation_virtual = (() => {
const weakref = stubs.weakref;
const Counter = stubs.Counter;
const dataclass = stubs.dataclass;
const torch = stubs.torch;
const Tensor = stubs.Tensor;
const Alone = stubs.Alone;
const MemoryStats = stubs.MemoryStats;
const SlotLayout = stubs.SlotLayout;
const Speeds = lema_plan_cost.Speeds;
const LayerBytes = stubs.LayerBytes;
const LayerReader = stubs.LayerReader;
const Ticket = stubs.Ticket;
class ScheduleError extends Exception {
}
ScheduleError.isClass = true;
class Clock {
constructor() {
const self = this;
self.now = 0.0;
}
__call__() {
const self = this;
return self.now;
}
wait_until(moment) {
const self = this;
self.now = py.max(self.now, moment);
}
turn_back(moment) {
const self = this;
self.now = moment;
}
}
Clock.isClass = true;
Clock.sig = [];
Clock.prototype.__call__.sig = [];
Clock.prototype.wait_until.sig = ["moment"];
Clock.prototype.turn_back.sig = ["moment"];
class Line {
constructor(speed) {
const self = this;
self.speed = speed;
self.free = 0.0;
self.busy = 0.0;
}
do(nbytes, not_before) {
const self = this;
let length, start;
start = py.max(py.bound(self, 'free'), not_before);
length = py.div(nbytes, self.speed);
self.free = py.add(start, length);
self.busy = py.add(self.busy, length);
return [start, py.bound(self, 'free')];
}
}
Line.isClass = true;
Line.sig = ["speed"];
Line.prototype.do.sig = ["nbytes", "not_before"];
class BufferState {
constructor(content = null, filled = 0.0, in_use = 0.0, leased = false) { this.content = content; this.filled = filled; this.in_use = in_use; this.leased = leased; }
fill(layer, moment) {
const self = this;
self.content = layer;
self.filled = moment;
}
use(until) {
const self = this;
self.in_use = py.max(self.in_use, until);
}
lease() {
const self = this;
self.leased = true;
}
release() {
const self = this;
self.leased = false;
}
}
BufferState.isClass = true;
BufferState.sig = ["content", "filled", "in_use", "leased"];
BufferState.fields = BufferState.sig;
BufferState.prototype.fill.sig = ["layer", "moment"];
BufferState.prototype.use.sig = ["until"];
BufferState.prototype.lease.sig = [];
BufferState.prototype.release.sig = [];
class VirtualDevice {
constructor(clock, speeds) {
const self = this;
self.clock = clock;
self.shared = py.eq(speeds.link, py.float("inf"));
self.disk = new Line(speeds.disk);
self.link = new Line(speeds.link);
self.back = new Line(speeds.link);
self.stall_boundaries = 0.0;
self.stall_upload = self.stall_boundaries;
self.stall_disk = self.stall_upload;
self.computed_until = 0.0;
self.computed = self.computed_until;
self.device = torch.device("meta");
self._bytes = py.call(Counter, []);
self.peak = py.call(Counter, []);
self._buffer_states = new Map([]);
self._read = 0.0;
self._ready = py.bound(self, '_read');
}
memory_of(tensor) {
const self = this;
return py.item(self._buffer_states, tensor.untyped_storage()._cdata);
}
memory() {
const self = this;
return py.call(MemoryStats, [0, 0, 0]);
}
host_buffer(nbytes, memory = null) {
const self = this;
return self._allocate("host", nbytes);
}
device_slots(nbytes, count) {
const self = this;
;
return new _Slot(self, (py.t(self.shared) ? null : self._allocate("device", nbytes)));
}
compute(seconds, lease = null, layer = null) {
const self = this;
let start, state;
start = py.max(self.clock.now, self.computed_until);
if ((lease != null)) {
state = self.memory_of(lease);
if ((state.content !== layer)) {
throw new ScheduleError("a layer is computed with another layer's weights");
}
start = py.max(start, state.filled);
self._account(start);
}
self.computed = py.add(self.computed, seconds);
self.computed_until = py.add(start, seconds);
if ((lease != null)) {
state.use(self.computed_until);
}
if (py.t(self.shared)) {
self.clock.wait_until(self.computed_until);
}
}
wait_for(moment) {
const self = this;
let start;
start = py.max(self.clock.now, self.computed_until);
self.stall_boundaries = py.add(self.stall_boundaries, py.max(0.0, py.sub(moment, start)));
self.computed_until = py.max(start, moment);
if (py.t(self.shared)) {
self.clock.wait_until(moment);
}
}
synchronize() {
const self = this;
self.clock.wait_until(py.max(self.computed_until, py.bound(self.link, 'free'), py.bound(self.back, 'free')));
}
uploaded(ready, read) {
const self = this;
self._ready = ready;
self._read = read;
}
_account(start) {
const self = this;
let on_disk, pause;
pause = py.max(0.0, py.sub(start, self.computed_until));
on_disk = py.min(pause, py.max(0.0, py.sub(py.bound(self, '_read'), self.computed_until)));
self.stall_disk = py.add(self.stall_disk, on_disk);
self.stall_upload = py.add(self.stall_upload, py.min(py.sub(pause, on_disk), py.max(0.0, py.sub(self._ready, py.bound(self, '_read')))));
}
_allocate(where, nbytes) {
const self = this;
let tensor;
py.set(self._bytes, where, py.add(py.item(self._bytes, where), nbytes));
py.set(self.peak, where, py.max(py.item(self.peak, where), py.item(self._bytes, where)));
tensor = py.method(torch, 'empty', [nbytes], {dtype: torch.uint8, device: self.device});
py.set(self._buffer_states, tensor.untyped_storage()._cdata, new BufferState());
weakref.finalize(tensor, self._bytes.subtract, new Map([[where, nbytes]]));
return tensor;
}
}
VirtualDevice.isClass = true;
VirtualDevice.prototype.replicas = py.call(Alone, []);
VirtualDevice.sig = ["clock", "speeds"];
VirtualDevice.prototype.memory_of.sig = ["tensor"];
VirtualDevice.prototype.memory.sig = [];
VirtualDevice.prototype.host_buffer.sig = ["nbytes", "memory"];
VirtualDevice.prototype.device_slots.sig = ["nbytes", "count"];
VirtualDevice.prototype.compute.sig = ["seconds", "lease", "layer"];
VirtualDevice.prototype.wait_for.sig = ["moment"];
VirtualDevice.prototype.synchronize.sig = [];
VirtualDevice.prototype.uploaded.sig = ["ready", "read"];
VirtualDevice.prototype._account.sig = ["start"];
VirtualDevice.prototype._allocate.sig = ["where", "nbytes"];
class _Slot {
constructor(device, memory) { this.device = device; this.memory = memory; }
upload(source, layout = null) {
const self = this;
let _, device, done, nbytes, state, target;
device = self.device;
state = self.device.memory_of(source);
if (((state.content == null) || py.gt(state.filled, device.clock.now))) {
throw new ScheduleError("a buffer was uploaded before it was filled");
}
if ((py.bound(self, 'memory') == null)) {
return new _Upload(device, source, state, state.filled, state.filled);
}
target = device.memory_of(py.bound(self, 'memory'));
nbytes = ((layout == null) ? source.numel() : layout.copied);
if (py.t(target.leased)) {
throw new ScheduleError("more layers are held than there are slots");
}
;[_, done] = py.list(device.link.do(nbytes, py.max(device.clock.now, target.in_use)));
state.use(done);
target.fill(state.content, done);
target.use(done);
target.lease();
return new _Upload(device, py.bound(self, 'memory'), target, state.filled, done);
}
}
_Slot.isClass = true;
_Slot.sig = ["device", "memory"];
_Slot.fields = _Slot.sig;
_Slot.prototype.upload.sig = ["source", "layout"];
class _Upload {
constructor(device, buffer, state, read, done) { this.device = device; this.buffer = buffer; this.state = state; this.read = read; this.done = done; }
wait() {
const self = this;
self.state.lease();
self.device.uploaded(py.bound(self, 'done'), self.read);
return self.buffer;
}
release() {
const self = this;
self.state.release();
}
drained() {
const self = this;
self.device.clock.wait_until((py.t(self.device.shared) ? self.state.in_use : py.bound(self, 'done')));
}
}
_Upload.isClass = true;
_Upload.sig = ["device", "buffer", "state", "read", "done"];
_Upload.fields = _Upload.sig;
_Upload.prototype.wait.sig = [];
_Upload.prototype.release.sig = [];
_Upload.prototype.drained.sig = [];
class VirtualReader extends LayerReader {
constructor(device) {
super(); const self = this;
null;
self._on = device;
}
submit(layer, buffer, before = null, name = "weights") {
const self = this;
let begin, device, done, now, start, state;
device = self._on;
state = self._on.memory_of(buffer);
now = device.clock.now;
if ((before != null)) {
py.call(before, [], {});
}
begin = device.clock.now;
device.clock.turn_back(now);
if (py.t(state.leased)) {
throw new ScheduleError("a buffer was refilled while its layer was on lease");
}
;[start, done] = py.list(device.disk.do(layer.read_bytes, begin));
if (py.lt(start, state.in_use)) {
throw new ScheduleError("a buffer was refilled while it was copied or computed with");
}
state.fill(layer, done);
self.bytes_read = py.add(self.bytes_read, layer.read_bytes);
return new _Read(device.clock, done);
}
}
VirtualReader.isClass = true;
VirtualReader.sig = ["device"];
VirtualReader.prototype.submit.sig = ["layer", "buffer", "before", "name"];
class _Read extends Ticket {
constructor(clock, end) {
super(); const self = this;
null;
self._clock = clock;
self._end = end;
}
done() {
const self = this;
return py.ge(self._clock.now, self._end);
}
wait() {
const self = this;
self._clock.wait_until(self._end);
}
}
_Read.isClass = true;
_Read.sig = ["clock", "end"];
_Read.prototype.done.sig = [];
_Read.prototype.wait.sig = [];
_Read.prototype.cancel = _Read.prototype.wait;
return {BufferState, Clock, Line, ScheduleError, VirtualDevice, VirtualReader, _Read, _Slot, _Upload};
})();
const lema_plan_simulation_simulator = (() => {
const deque = stubs.deque;
const dataclass = stubs.dataclass;
const Path = stubs.Path;
const NUM_BUFFERS = lema_activations_boundaries.NUM_BUFFERS;
const Backend = stubs.Backend;
const Allocation = lema_plan_cost.Allocation;
const Demand = lema_plan_cost.Demand;
const Speeds = lema_plan_cost.Speeds;
const Tier = lema_plan_cost.Tier;
const down_seconds = lema_plan_cost.down_seconds;
const group_numbers = lema_plan_cost.group_numbers;
const rows_in_host = lema_plan_cost.rows_in_host;
const saved_elsewhere = lema_plan_cost.saved_elsewhere;
const device_parts = lema_plan_memory.device_parts;
const host_parts = lema_plan_memory.host_parts;
const Clock = lema_plan_simulation_virtual.Clock;
const VirtualDevice = lema_plan_simulation_virtual.VirtualDevice;
const VirtualReader = lema_plan_simulation_virtual.VirtualReader;
const LayerStream = lema_stream_stream.LayerStream;
const ByteRun = stubs.ByteRun;
const LayerBytes = stubs.LayerBytes;
const ExpertGroup = lema_stream_schedule.ExpertGroup;
const in_parts = lema_stream_schedule.in_parts;
const training_order = lema_stream_schedule.training_order;
const AHEAD = py.sub(NUM_BUFFERS, 1);
const STEPS = 3;
class Simulated {
constructor(seconds, compute, link, disk, stall_disk, stall_upload, stall_boundaries, bytes_read, bytes_uploaded, device_peak, host_peak) { this.seconds = seconds; this.compute = compute; this.link = link; this.disk = disk; this.stall_disk = stall_disk; this.stall_upload = stall_upload; this.stall_boundaries = stall_boundaries; this.bytes_read = bytes_read; this.bytes_uploaded = bytes_uploaded; this.device_peak = device_peak; this.host_peak = host_peak; }
get bottleneck() {
const self = this;
let busy;
busy = new Map([["compute", py.bound(self, 'compute')], ["link", self.link], ["disk", self.disk]]);
return py.max.call({key: ((name) => (py.item(busy, name)))}, busy);
}
}
Simulated.isClass = true;
Simulated.sig = ["seconds", "compute", "link", "disk", "stall_disk", "stall_upload", "stall_boundaries", "bytes_read", "bytes_uploaded", "device_peak", "host_peak"];
Simulated.fields = Simulated.sig;
const layers_like = py.named(function(demand) {
let read;
read = (function*(t1) { for (const t2 of t1) { const number = t2; yield py.call(ByteRun, [py.call(Path, []), 0, demand.total("read_bytes", [number]), 0]); } })(py.iter(py.range(py.len(demand.leased))));
return (() => { const made$ = []; for (const t3 of py.iter(py.zip.call({strict: true}, read, demand.leased))) { const [run, [_, nbytes]] = py.list(t3); made$.push(py.call(LayerBytes, [[], [run], [], nbytes])); } return made$; })();
}, ["demand"]);
const simulate = py.named(function(demand, allocation, speeds) {
let _, before, clock, device, extra_bytes, groups, in_host, on_device, run, spent, stream;
clock = new Clock();
groups = new Map((() => { const made$ = []; for (const t5 of py.iter(py.items(py.call(group_numbers, [demand.groups])))) { const [layer, numbers] = py.list(t5); made$.push([layer, (() => { const made$ = []; for (const t4 of py.iter(numbers)) { const number = t4; made$.push(new ExpertGroup(number, 0, 1)); } return made$; })()]); } return made$; })());
device = new VirtualDevice(clock, speeds);
stream = py.call(LayerStream, [py.call(layers_like, [demand]), device], {prefetch_depth: py.sub(allocation.slots, 1), residents: allocation.residents, host_cached: allocation.host_cached, groups: groups, reader: new VirtualReader(device), clock: clock});
device.synchronize();
run = new _Run(demand, allocation, stream, device);
run.announce();
for (const t6 of py.iter(py.range(py.sub(STEPS, 1)))) { _ = t6;
run.step();
}
before = run.totals();
run.step();
spent = new Map((() => { const made$ = []; for (const t7 of py.iter(py.items(run.totals()))) { const [name, total] = py.list(t7); made$.push([name, py.sub(total, py.item(before, name))]); } return made$; })());
stream.close();
on_device = py.call(device_parts, [demand, allocation]);
extra_bytes = py.sum((function*(t8) { for (const t9 of t8) { const [part, size] = py.list(t9); if (py.hasnot(part, ["slots", "residents"])) { yield size; } } })(py.iter(py.items(on_device))));
in_host = py.call(host_parts, [demand, allocation]);
return py.call(Simulated, [], {...py.object(spent), device_peak: py.add((py.t(device.shared) ? py.sub(py.item(device.peak, "host"), py.item(in_host, "cached")) : py.item(device.peak, "device")), extra_bytes), host_peak: py.add(py.item(device.peak, "host"), py.sum((function*(t10) { for (const t11 of t10) { const [part, size] = py.list(t11); if (py.hasnot(part, ["ring", "cached"])) { yield size; } } })(py.iter(py.items(in_host)))))});
}, ["demand", "allocation", "speeds"]);
class _Run {
constructor(demand, allocation, stream, device) {
const self = this;
let index, nbytes;
self.demand = demand;
self.allocation = allocation;
self.stream = stream;
self.device = device;
self.order = py.call(training_order, [py.len(demand.layers), demand.lowest]);
self.away = new Map([]);
for (const t12 of py.iter(py.bound(demand, 'keeping'))) { index = t12;
if ((py.hasnot(index, allocation.saved) && py.ne(allocation.boundaries, "device"))) {
py.set(self.away, index, [demand.boundary_bytes, allocation.boundaries]);
}
}
for (const t13 of py.iter(py.items(py.call(saved_elsewhere, [demand, allocation])))) { ;[index, nbytes] = py.list(t13);
py.set(self.away, index, [nbytes, allocation.saved_on]);
}
self.times = ((py.call(rows_in_host, [demand, allocation]) == null) ? 1 : 2);
self._fetched = new Map([]);
}
announce() {
const self = this;
self.stream.announce(self.stream.training_order(py.bound(self, 'demand').lowest));
}
step() {
const self = this;
let _, below, demand, device, index, pending, top, waited;
demand = py.bound(self, 'demand');
device = self.device;
device.compute(demand.outside_seconds);
for (const t14 of py.iter(py.slice(self.order, null, demand.top, null))) { index = t14;
self._visit(index, py.item(demand.layers, index).forward);
if (py.has(index, self.away)) {
self._send_away(...py.iter(py.item(self.away, index)));
}
}
top = py.item(demand.layers, demand.top);
py.method(self, '_visit', [demand.top, py.add(py.add(top.forward, top.backward), demand.head_seconds)], {top: demand.top});
self._hand_over(demand.top);
device.synchronize();
self.announce();
below = py.slice(self.order, py.add(demand.top, 1), null, null);
pending = py.call(deque, [(function*(t15) { for (const t16 of t15) { const index = t16; if (py.has(index, self.away)) { yield index; } } })(py.iter(below))]);
for (const t17 of py.iter(py.range(py.min(AHEAD, py.len(pending))))) { _ = t17;
self._bring_back(py.popleft(pending));
}
for (const t18 of py.iter(below)) { index = t18;
waited = py.has(index, self._fetched);
if (py.t(waited)) {
device.wait_for(py.pop(self._fetched, index));
}
py.method(self, '_visit', [index, py.sub(py.call(down_seconds, [demand, py.bound(self, 'allocation'), index]), py.item(demand.layers, index).expand)], {down: true});
self._hand_over(index);
if ((py.t(waited) && py.t(pending))) {
self._bring_back(py.popleft(pending));
}
}
device.synchronize();
}
totals() {
const self = this;
let counters, device;
device = self.device;
counters = self.stream.counters;
return new Map([["seconds", device.clock.now], ["compute", device.computed], ["link", device.link.busy], ["disk", device.disk.busy], ["stall_disk", device.stall_disk], ["stall_upload", device.stall_upload], ["stall_boundaries", device.stall_boundaries], ["bytes_read", counters.bytes_read], ["bytes_uploaded", (py.t(device.shared) ? 0 : counters.bytes_uploaded)]]);
}
_visit(index, seconds, top = null, down = false) {
const self = this;
let expand, lease, number, part, part_seconds, parts;
expand = py.item(py.bound(self, 'demand').layers, index).expand;
parts = py.slice(py.call(in_parts, [[index], self.stream.parts], {top_layer: top, down: down}), 1, null, null);
part_seconds = (py.t(parts) ? py.div(py.add(expand, seconds), py.add(1, py.len(parts))) : py.add(expand, seconds));
const t19 = self.stream.lease(index);
lease = py.enter(t19); try {
self.device.compute(part_seconds, py.bound(lease, 'slot'), py.item(self.stream.layers, index));
for (const t20 of py.iter(parts)) { number = t20;
const t21 = self.stream.lease(number);
part = py.enter(t21); try {
self.device.compute(part_seconds, py.bound(part, 'slot'), py.item(self.stream.layers, number));
} finally { py.exit(t21); }
}
} finally { py.exit(t19); }
}
_hand_over(index) {
const self = this;
let nbytes;
if (py.t((nbytes = py.item(py.bound(self, 'demand').layers, index).gradient_bytes))) {
self.device.back.do(nbytes, self.device.computed_until);
}
}
_send_away(nbytes, tier) {
const self = this;
let _, there;
;[_, there] = py.list(self.device.back.do(nbytes, self.device.computed_until));
if (py.eq(tier, "disk")) {
self.device.disk.do(nbytes, there);
}
}
_bring_back(index) {
const self = this;
let _, device, here, nbytes, tier;
;[nbytes, tier] = py.list(py.item(self.away, index));
nbytes = py.mul(nbytes, py.bound(self, 'times'));
device = self.device;
here = self.device.clock.now;
if (py.eq(tier, "disk")) {
;[_, here] = py.list(device.disk.do(nbytes, here));
}
{ const t22 = py.list(device.link.do(nbytes, here)); _ = t22[0]; py.set(self._fetched, index, t22[1]); };
}
}
_Run.isClass = true;
_Run.sig = ["demand", "allocation", "stream", "device"];
_Run.prototype.announce.sig = [];
_Run.prototype.step.sig = [];
_Run.prototype.totals.sig = [];
_Run.prototype._visit.sig = ["index", "seconds", "top", "down"];
_Run.prototype._hand_over.sig = ["index"];
_Run.prototype._send_away.sig = ["nbytes", "tier"];
_Run.prototype._bring_back.sig = ["index"];
return {AHEAD, STEPS, Simulated, _Run, layers_like, simulate};
})();
const lema_plan_needs = (() => {
const dataclass = stubs.dataclass;
const field = stubs.field;
const replace = stubs.replace;
const cached_property = stubs.cached_property;
const Backend = stubs.Backend;
const local_processes = stubs.local_processes;
const LemaConfig = stubs.LemaConfig;
const CHUNK_TOKENS = stubs.CHUNK_TOKENS;
const moments_elsewhere = stubs.moments_elsewhere;
const MemoryLimitError = stubs.MemoryLimitError;
const buffer_bytes = stubs.buffer_bytes;
const allocated = lema_plan_allocate.allocated;
const of_one_process = lema_plan_allocate.of_one_process;
const surely_fits = lema_plan_allocate.surely_fits;
const untimed = lema_plan_allocate.untimed;
const whether_recomputed = lema_plan_allocate.whether_recomputed;
const Blueprint = stubs.Blueprint;
const Allocation = lema_plan_cost.Allocation;
const Demand = lema_plan_cost.Demand;
const Traffic = lema_plan_cost.Traffic;
const traffic = lema_plan_cost.traffic;
const with_waiting = stubs.with_waiting;
const MachineState = lema_plan_machine.MachineState;
const Memory = stubs.Memory;
const unknown_speeds = lema_plan_machine.unknown_speeds;
const device_parts = lema_plan_memory.device_parts;
const host_parts = lema_plan_memory.host_parts;
const Simulated = lema_plan_simulation_simulator.Simulated;
const simulate = lema_plan_simulation_simulator.simulate;
const in_chunks = stubs.in_chunks;
const lengthened = stubs.lengthened;
const run_length = stubs.run_length;
const StepShape = lema_plan_work_step.StepShape;
const Timings = lema_plan_work_step.Timings;
const demand_of = lema_plan_work_step.demand_of;
const training_of = stubs.training_of;
const MicroBatch = lema_plan_work_workload.MicroBatch;
const Workload = lema_plan_work_workload.Workload;
const long_head_in_pieces = stubs.long_head_in_pieces;
const measure = stubs.measure;
class Planner {
constructor(config, blueprint, machine_state, workload, timings, shape, processes = 1, device_memory = null, note = "", backend = null, chooses_chunk = false, chooses_keys = false, chooses_tile = false, workload_cache = new Map()) { this.config = config; this.blueprint = blueprint; this.machine_state = machine_state; this.workload = workload; this.timings = timings; this.shape = shape; this.processes = processes; this.device_memory = device_memory; this.note = note; this.backend = backend; this.chooses_chunk = chooses_chunk; this.chooses_keys = chooses_keys; this.chooses_tile = chooses_tile; this.workload_cache = workload_cache; }
get limits() {
const self = this;
let device;
device = ((self.device_memory == null) ? self.config.device_memory : self.device_memory);
return self.machine_state.limits(device, self.config.host_memory);
}
get keys_are_open() {
const self = this;
let config;
config = self.config;
return py.both(py.eq(config.keys_values, "auto"), () => py.both((config.sequence_chunk != null), () => py.both((config.context_parallel_size == null), () => py.both((!py.t(self.machine_state.machine.shared)), () => py.either(py.eq(config.sequence_chunk, "auto"), () => self.shape.micro_batch.is_cut)))));
}
get surely_fits() {
const self = this;
return py.call(surely_fits, [self.blueprint, self.shape, py.item(py.bound(self, 'limits'), 0)]);
}
demand(shape = null, workload = null, scale = 1.0) {
const self = this;
let copies, overhead, parts, rows, step_demand;
workload = py.either(workload, () => self.workload);
step_demand = py.call(demand_of, [self.blueprint.layers, workload, ((self.timings == null) ? null : self.timings.times(scale)), ((workload == null) ? null : py.either(shape, () => self.shape))], {outside_bytes: self.blueprint.outside_bytes, adapter_bytes: py.sub(py.add(self.blueprint.adapter_bytes, self.blueprint.reference_bytes), self._elsewhere()), lowest: self.blueprint.lowest_adapted, shared: self.machine_state.machine.shared, trained: self.blueprint.trained, pieces: self.blueprint.pieces, groups: self.blueprint.group_bytes});
rows = py.mul(self.blueprint.tables.row_bytes, py.either(shape, () => self.shape).tokens);
if (!py.t(step_demand.shared)) {
step_demand = py.replace(step_demand, {buffer_bytes: py.call(buffer_bytes, [self.blueprint.model])});
}
overhead = self.machine_state.machine.overhead;
step_demand = py.replace(step_demand, {row_bytes: rows, expanded_bytes: self.blueprint.expanded_bytes, overhead: overhead});
parts = self.blueprint.parallel.size;
if ((self.backend == null)) {
return py.replace(step_demand, {processes: py.mul(self.processes, parts)});
}
step_demand = py.call(of_one_process, [step_demand, self.backend.replicas], {sharded: self.config.shard_weights});
copies = py.mul(step_demand.processes, parts);
return py.replace(step_demand, {processes: py.min(copies, py.either(py.call(local_processes, []), () => copies))});
}
allocation(demand, changes = new Map()) {
const self = this;
let best, config, error, machine, memory, recompute, resident_fraction, speeds;
config = py.method(self.config, 'model_copy', [], {update: changes});
machine = self.machine_state.machine;
speeds = self.machine_state.machine.speeds;
if ((self.blueprint.parts != null)) {
config = py.method(config, 'model_copy', [], {update: new Map([["gradient_checkpointing", true]])});
}
recompute = py.call(whether_recomputed, [config]);
if (((config.device_memory == null) || (recompute === false) || (py.t(recompute) && py.eq(config.device_memory, "auto")))) {
demand = py.call(untimed, [demand]);
speeds = py.call(unknown_speeds, [], {shared: machine.shared});
}
memory = [machine.device_memory, machine.host_memory, self.machine_state.host_available];
resident_fraction = ((self.blueprint.trained == null) ? self.machine_state.resident_fraction : 0.0);
try {
best = py.call(allocated, [config, demand, speeds, ...py.iter(memory)], {resident_fraction: resident_fraction, device_free: self.machine_state.device_free});
return py.replace(best, {experts: self.blueprint.experts, runs_again: self.blueprint.runs_again});
}
catch (caught) {
if (caught instanceof MemoryLimitError) {
error = caught;
if ((self.blueprint.trained != null)) {
error.explain("allow that much, or train adapters, whose base model streams from disk");
}
throw caught;
} else
{ throw caught; }
}
}
unlimited() {
const self = this;
return py.replace(self, {config: py.method(self.config, 'model_copy', [], {update: new Map([["device_memory", null]])})});
}
get chosen() {
const self = this;
let is_full, rows, settings;
rows = self.shape.micro_batch.rows;
settings = new Map([["loss_chunk_tokens", self.config.loss_chunk_tokens]]);
if (py.t(self.chooses_chunk)) {
py.set(settings, "sequence_chunk", py.bound(self.shape.micro_batch, 'chunk'));
}
if (py.t(self.chooses_keys)) {
py.set(settings, "keys_values", self.config.keys_values);
}
if (py.t(self.chooses_tile)) {
py.set(settings, "mlp_tile_tokens", self.shape.micro_batch.tile);
}
is_full = py.ge(py.mul(rows, self.config.gradient_accumulation_steps), self.shape.num_rows);
return ((py.t(is_full) || py.t(self.config.counts_tokens)) ? settings : new Map([...settings, ["micro_batch_size", rows]]));
}
needs() {
const self = this;
let allocation, demand, trained;
demand = self.demand();
allocation = self.allocation(demand);
if (((trained = self.blueprint.trained) != null)) {
demand = py.replace(demand, {training: py.call(training_of, [self.config, trained, demand, allocation], {limits: py.bound(self, 'limits'), rows: self.shape.micro_batch.rows})});
}
return new StepNeeds(self, demand, allocation);
}
simulated(demand, allocation) {
const self = this;
return py.call(simulate, [demand, allocation, self.machine_state.machine.speeds]);
}
fits(demand) {
const self = this;
let allocation;
try {
allocation = self.allocation(demand);
}
catch (caught) {
if (caught instanceof MemoryLimitError) {
return false;
} else
{ throw caught; }
}
return py.le(py.sum(py.values(py.call(device_parts, [demand, allocation]))), self.machine_state.machine.device_memory);
}
}
Planner.isClass = true;
Planner.sig = ["config", "blueprint", "machine_state", "workload", "timings", "shape", "processes", "device_memory", "note", "backend", "chooses_chunk", "chooses_keys", "chooses_tile", "workload_cache"];
Planner.fields = Planner.sig;
Planner.prototype.demand.sig = ["shape", "workload", "scale"];
Planner.prototype.allocation.sig = ["demand", "**"];
Planner.prototype.unlimited.sig = [];
Planner.prototype.needs.sig = [];
Planner.prototype.simulated.sig = ["demand", "allocation"];
Planner.prototype.fits.sig = ["demand"];
class StepNeeds {
constructor(planner, demand, allocation) { this.planner = planner; this.demand = demand; this.allocation = allocation; }
get device() { return py.once(this, 'device', () => {
const self = this;
return py.call(device_parts, [py.bound(self, 'demand'), py.bound(self, 'allocation')]);
}); }
get host() { return py.once(this, 'host', () => {
const self = this;
let parts, private_bytes, trained;
parts = py.call(host_parts, [py.bound(self, 'demand'), py.bound(self, 'allocation')]);
if (((trained = self.planner.blueprint.trained) != null)) {
private_bytes = py.sum((function*(t3) { for (const t4 of t3) { const [layer, names] = py.list(t4); if (py.t(names)) { yield layer.slot_bytes; } } })(py.iter(py.zip.call({strict: true}, py.bound(self, 'demand').layers, trained.names))));
py.set(parts, "cached", py.add(py.item(parts, "cached"), py.mul(py.sub(py.bound(self, 'demand').processes, 1), private_bytes)));
}
return parts;
}); }
get mapped() {
const self = this;
return py.mul(py.bound(self, 'demand').processes, py.bound(self, 'demand').training.mapped);
}
get seconds() {
const self = this;
let planner;
planner = self.planner;
return ((planner.timings == null) ? null : planner.simulated(py.bound(self, 'demand'), py.bound(self, 'allocation')).seconds);
}
traffic(steps) {
const self = this;
return py.call(traffic, [py.bound(self, 'demand'), py.bound(self, 'allocation'), steps], {rewritten: (self.planner.blueprint.trained != null)});
}
}
StepNeeds.isClass = true;
StepNeeds.sig = ["planner", "demand", "allocation"];
StepNeeds.fields = StepNeeds.sig;
StepNeeds.prototype.traffic.sig = ["steps"];
return {Planner, StepNeeds};
})();
const lema_plan_choice = (() => {
const suppress = stubs.suppress;
const dataclass = stubs.dataclass;
const replace = stubs.replace;
const has_addresses = stubs.has_addresses;
const ConfigError = stubs.ConfigError;
const MemoryLimitError = stubs.MemoryLimitError;
const TILES = stubs.TILES;
const main_dtype = stubs.main_dtype;
const layers_stay = lema_plan_allocate.layers_stay;
const untimed = lema_plan_allocate.untimed;
const whether_recomputed = lema_plan_allocate.whether_recomputed;
const Blueprint = stubs.Blueprint;
const seconds = lema_plan_cost.seconds;
const Planner = lema_plan_needs.Planner;
const LONGEST = stubs.LONGEST;
const in_proportion = stubs.in_proportion;
const StepShape = lema_plan_work_step.StepShape;
const Timings = lema_plan_work_step.Timings;
const by_arithmetic = lema_plan_work_step.by_arithmetic;
const rows_each = lema_plan_work_step.rows_each;
const Workload = lema_plan_work_workload.Workload;
const ENOUGH = 512;
const WORTH_IT = 0.98;
const LESS = [256, 64];
const FEW_GROUPS = 8;
const SETTING = "experts_per_slot";
const SMALLEST = 256;
const LARGE = 2048;
class Choice {
constructor(rows, chunk_tokens, head_in_pieces = false, experts = 0, runs_again = false, chunk = null, tile = null) { this.rows = rows; this.chunk_tokens = chunk_tokens; this.head_in_pieces = head_in_pieces; this.experts = experts; this.runs_again = runs_again; this.chunk = chunk; this.tile = tile; }
}
Choice.isClass = true;
Choice.sig = ["rows", "chunk_tokens", "head_in_pieces", "experts", "runs_again", "chunk", "tile"];
Choice.fields = Choice.sig;
const choice_of = py.named(function(planner) {
return new Choice(planner.shape.micro_batch.rows, planner.config.loss_chunk_tokens, py.bool(planner.blueprint.head_in_pieces), planner.blueprint.experts, planner.blueprint.runs_again, py.bound(planner.shape.micro_batch, 'chunk'), planner.shape.micro_batch.tile);
}, ["planner"]);
const cut = py.named(function(planner, choice) {
let blueprint, longer, micro_batch;
blueprint = py.call(_in_groups, [planner.blueprint, choice.experts], {runs_again: choice.runs_again});
blueprint = py.call(_with_head, [blueprint], {in_pieces: choice.head_in_pieces});
micro_batch = py.replace(planner.shape.micro_batch, {rows: choice.rows, chunk: py.bound(choice, 'chunk'), tile: choice.tile});
longer = py.div(choice.rows, planner.shape.micro_batch.rows);
planner = py.replace(planner, {blueprint: blueprint, config: py.method(planner.config, 'model_copy', [], {update: new Map([["loss_chunk_tokens", choice.chunk_tokens]])}), timings: ((planner.timings == null) ? null : planner.timings.times(longer)), shape: new StepShape(micro_batch, planner.shape.num_rows)});
return ((planner.workload == null) ? planner : py.replace(planner, {workload: planner.work(micro_batch)}));
}, ["planner", "choice"]);
const _in_groups = py.named(function(blueprint, experts, runs_again) {
let parts;
if (py.eq([experts, runs_again], [blueprint.experts, blueprint.runs_again])) {
return blueprint;
}
parts = (py.t(experts) ? blueprint.parts_of(experts) : null);
return py.replace(blueprint, {parts: parts, experts: experts, runs_again: runs_again});
}, ["blueprint", "experts", "runs_again"]);
const _with_head = py.named(function(blueprint, in_pieces) {
let head, outside_bytes;
head = blueprint.head;
if ((blueprint.head_in_pieces === in_pieces)) {
return blueprint;
}
if ((head.module == null)) {
return py.replace(blueprint, {head_in_pieces: false});
}
outside_bytes = blueprint.outside_bytes;
if (py.t(in_pieces)) {
outside_bytes = py.sub(outside_bytes, ((blueprint.head_in_pieces == null) ? 0 : head.nbytes));
} else {
outside_bytes = py.add(outside_bytes, head.nbytes);
}
return py.replace(blueprint, {head_in_pieces: in_pieces, pieces: (py.t(in_pieces) ? head.pieces(blueprint.leased) : []), outside_bytes: outside_bytes});
}, ["blueprint", "in_pieces"]);
const candidates = py.named(function*(planner) {
let experts, first, in_pieces, runs_again;
for (const t1 of py.iter(py.call(_expert_groups, [planner]))) { ;[experts, runs_again] = py.list(t1);
for (const t2 of py.iter(py.call(_heads, [planner.blueprint]))) { in_pieces = t2;
first = py.replace(py.call(choice_of, [planner]), {head_in_pieces: in_pieces, experts: experts, runs_again: runs_again});
yield* py.iter(py.call(_smaller, [planner, first]));
}
}
}, ["planner"]);
const with_work = stubs.with_work;
const best = py.named(function(planner) {
let fits, in_host, on_device;
if (!py.t(planner.keys_are_open)) {
return py.item(py.call(_best_sizes, [planner]), 0);
}
;[on_device, fits] = py.list(py.call(_best_sizes, [py.call(_with_keys, [planner, "device"])]));
if ((py.t(fits) || (planner.workload == null))) {
return on_device;
}
try {
;[in_host, fits] = py.list(py.call(_best_sizes, [py.call(_with_keys, [planner, "host"])]));
if (py.t(fits)) {
return in_host;
}
} catch (caught) { if (!(caught instanceof ConfigError)) { throw caught; } }
return on_device;
}, ["planner"]);
const _with_keys = py.named(function(planner, location) {
let micro_batch;
micro_batch = py.replace(planner.shape.micro_batch, {host_keys: py.eq(location, "host")});
return py.call(_measured, [py.replace(planner, {config: py.method(planner.config, 'model_copy', [], {update: new Map([["keys_values", location]])}), shape: py.replace(planner.shape, {micro_batch: micro_batch}), chooses_keys: true})]);
}, ["planner", "location"]);
const _measured = py.named(function(planner) {
return ((planner.workload == null) ? planner : py.call(with_work, [planner]));
}, ["planner"]);
const _best_sizes = py.named(function(planner) {
let chosen, chunks, config, fits, fitting, sizes, smallest, tiles, uncut;
config = planner.config;
tiles = py.eq(config.mlp_tile_tokens, "auto");
chunks = py.either(py.eq(config.sequence_chunk, "auto"), () => planner.chooses_chunk);
if (!(py.t(tiles) || py.t(chunks))) {
;[chosen, fits] = py.list(py.call(_first_that_fits, [planner]));
return [chosen, py.both(fits, () => py.either((!py.t(planner.chooses_keys)), () => py.call(_in_memory, [chosen])))];
}
if (py.t(tiles)) {
planner = py.call(_with_tile, [planner, null]);
}
smallest = null;
if (!(py.t(chunks) && py.t(py.call(_exceeds, [planner])))) {
uncut = (py.t(chunks) ? py.call(_with_chunk, [planner, null]) : planner);
if (((fitting = py.call(_fitting, [uncut])) != null)) {
return [fitting, true];
}
smallest = uncut;
if ((py.t(tiles) && py.t((sizes = py.call(_tile_sizes, [uncut]))))) {
if (((fitting = py.call(_largest, [uncut, sizes, _with_tile])) != null)) {
return [fitting, true];
}
smallest = py.call(_with_tile, [uncut, py.item(sizes, 0)]);
}
}
if ((py.t(chunks) && py.t((sizes = py.call(_sizes, [planner.shape.micro_batch.length]))))) {
if (((fitting = py.call(_largest, [planner, sizes, _with_chunk])) != null)) {
return [py.call(_fastest_chunks, [planner, sizes, fitting]), true];
}
smallest = py.call(_with_chunk, [planner, py.item(sizes, 0)]);
}
return [py.item(py.call(_first_that_fits, [((smallest == null) ? planner : smallest)]), 0), false];
}, ["planner"]);
const _sizes = py.named(function(tokens) {
return (() => { const made$ = []; for (const t3 of py.iter(py.range(py.sub(py.bit_length(SMALLEST), 1), py.bit_length(py.sub(tokens, 1))))) { const power = t3; made$.push(py.shl(1, power)); } return made$; })();
}, ["tokens"]);
const _tile_sizes = py.named(function(planner) {
let error, sizes;
sizes = py.call(_sizes, [planner.shape.micro_batch.tokens]);
try {
if (py.t(sizes)) {
py.call(_with_tile, [planner, py.item(sizes, (-1))]);
}
}
catch (caught) {
if (caught instanceof ConfigError) {
error = caught;
if (py.ne(error.where, TILES)) {
throw caught;
}
return [];
} else
{ throw caught; }
}
return sizes;
}, ["planner"]);
const _largest = py.named(function(planner, sizes, with_size) {
let candidate, high, largest, low, middle;
;[low, high] = py.list([0, py.len(sizes)]);
largest = null;
while (py.lt(low, high)) {
middle = py.floordiv(py.add(py.add(low, high), 1), 2);
candidate = py.call(_fitting, [py.call(with_size, [planner, py.item(sizes, py.sub(middle, 1))], {})]);
if ((candidate == null)) {
high = py.sub(middle, 1);
} else {
largest = candidate;
low = middle;
}
}
return largest;
}, ["planner", "sizes", "with_size"]);
const _fitting = py.named(function(planner) {
let candidate, fits;
;[candidate, fits] = py.list(py.call(_first_that_fits, [planner]));
return ((py.t(fits) && py.t(py.call(_in_memory, [candidate]))) ? candidate : null);
}, ["planner"]);
const _fastest_chunks = py.named(function(planner, sizes, largest) {
let size, smaller;
size = py.bound(largest.shape.micro_batch, 'chunk');
if (((planner.timings == null) || py.t(planner.config.deterministic) || (size == null))) {
return largest;
}
smaller = (() => { const made$ = []; for (const t5 of py.iter(sizes)) { const candidate = t5; if ((py.le(LARGE, candidate) && py.lt(candidate, size))) { made$.push(py.call(_fitting, [py.call(_with_chunk, [planner, candidate])])); } } return made$; })();
return py.call(_fast_enough, [[...py.iter((function*(t6) { for (const t7 of t6) { const fitting = t7; if ((fitting != null)) { yield fitting; } } })(py.iter(smaller))), largest]]);
}, ["planner", "sizes", "largest"]);
const _with_tile = py.named(function(planner, tile) {
let micro_batch;
micro_batch = py.replace(planner.shape.micro_batch, {tile: tile});
return py.call(_measured, [py.replace(planner, {config: py.method(planner.config, 'model_copy', [], {update: new Map([["mlp_tile_tokens", tile]])}), shape: py.replace(planner.shape, {micro_batch: micro_batch}), timings: null, chooses_tile: true})]);
}, ["planner", "tile"]);
const _exceeds = py.named(function(planner) {
let batch, in_groups, limit, rows, work;
batch = planner.shape.micro_batch;
limit = py.either(py.item(py.bound(planner, 'limits'), 0), () => planner.machine_state.free(planner.processes));
in_groups = py.both((planner.config.experts_per_slot != null), () => planner.blueprint.most_experts);
if (((planner.workload == null) || py.le(batch.length, py.mul(2, LONGEST)) || py.t(in_groups))) {
return false;
}
rows = py.min([batch.rows, ...py.iter(py.call(_fewer_rows, [planner]))]);
work = planner.least_work(py.replace(batch, {rows: rows, chunk: null}));
return (py.lt(0, limit) && py.lt(limit, py.max((function*(t8) { for (const t9 of t8) { const layer = t9; yield py.bound(layer, 'working_bytes'); } })(py.iter(work.works)))));
}, ["planner"]);
const _fast_enough = py.named(function(planners) {
let taken;
if ((py.eq(py.len(planners), 1) || (py.item(planners, 0).timings == null))) {
return py.item(planners, (-1));
}
taken = (() => { const made$ = []; for (const t10 of py.iter(planners)) { const planner = t10; made$.push(py.call(_seconds, [planner])); } return made$; })();
return py.item((() => { const made$ = []; for (const t11 of py.iter(py.zip.call({strict: true}, planners, taken))) { const [planner, seconds_taken] = py.list(t11); if (py.le(py.mul(WORTH_IT, seconds_taken), py.min(taken))) { made$.push(planner); } } return made$; })(), (-1));
}, ["planners"]);
const _with_chunk = py.named(function(planner, chunk) {
let micro_batch, work;
micro_batch = py.replace(planner.shape.micro_batch, {chunk: chunk});
work = ((planner.workload == null) ? null : planner.work(micro_batch));
return py.replace(planner, {config: py.method(planner.config, 'model_copy', [], {update: new Map([["sequence_chunk", chunk]])}), shape: py.replace(planner.shape, {micro_batch: micro_batch}), workload: work, timings: py.call(_timings_of, [planner, work]), chooses_chunk: true});
}, ["planner", "chunk"]);
const _timings_of = py.named(function(planner, work) {
let itemsize, state;
if (((planner.timings == null) || (planner.workload == null) || (work == null))) {
return null;
}
state = planner.machine_state;
if (py.eq(state.speeds, "profile")) {
itemsize = py.call(main_dtype, [planner.blueprint.model]).itemsize;
return py.call(by_arithmetic, [work, planner.blueprint.layers, state.machine, itemsize]);
}
return py.call(in_proportion, [planner.timings, planner.workload, work]);
}, ["planner", "work"]);
const _in_memory = py.named(function(planner) {
let free;
if ((planner.config.device_memory != null)) {
return true;
}
free = planner.machine_state.free(planner.processes);
return py.either((!py.t(free)), () => py.le(py.sum(py.values(planner.needs().device)), free));
}, ["planner"]);
const _first_that_fits = py.named(function(planner) {
let candidate, choice, error, fastest, leased, refused;
refused = null;
candidate = planner;
for (const t12 of py.iter(py.call(candidates, [planner]))) { choice = t12;
leased = [choice.head_in_pieces, choice.experts, choice.runs_again];
if (py.eq(leased, refused)) {
continue;
}
candidate = py.call(cut, [planner, choice]);
let t13 = false;
try {
candidate.needs();
t13 = true;
}
catch (caught) {
if (caught instanceof MemoryLimitError) {
error = caught;
refused = (py.has("device", error.where) ? refused : leased);
} else
{ throw caught; }
}
if (t13) {
fastest = ((candidate.timings == null) ? candidate : py.call(_fastest, [candidate]));
return [fastest, true];
}
}
return [candidate, false];
}, ["planner"]);
const _fastest = py.named(function(planner) {
let fastest, least, quicker, taken;
if ((py.t(planner.config.deterministic) || !py.t(py.call(seconds_decide, [planner])))) {
return planner;
}
fastest = planner;
least = py.call(_seconds, [planner]);
while (py.t((quicker = (() => { const made$ = []; for (const t14 of py.iter((function*(t15) { for (const t16 of t15) { const choice = t16; yield py.call(cut, [fastest, choice]); } })(py.iter(py.call(_next_smaller, [fastest]))))) { const candidate = t14; if (py.lt((taken = py.call(_seconds, [candidate])), py.mul(WORTH_IT, least))) { made$.push([taken, candidate]); } } return made$; })()))) {
;[least, fastest] = py.list(py.min.call({key: ((pair) => (py.item(pair, 0)))}, quicker));
}
return fastest;
}, ["planner"]);
const seconds_decide = py.named(function(planner) {
let allocation, chunk, demand, limit, recompute, stay;
limit = planner.config.device_memory;
recompute = py.call(whether_recomputed, [planner.config]);
if (((limit == null) || (recompute === false))) {
return false;
}
if ((planner.config.sequence_chunk != null)) {
chunk = py.bound(planner.shape.micro_batch, 'chunk');
return py.both(planner.chooses_chunk, () => py.both(py.ne(limit, "auto"), () => py.both((chunk != null), () => py.gt(chunk, LARGE))));
}
if (py.t(recompute)) {
return py.ne(limit, "auto");
}
demand = py.call(untimed, [planner.demand()]);
try {
allocation = planner.allocation(demand);
}
catch (caught) {
if (caught instanceof MemoryLimitError) {
return false;
} else
{ throw caught; }
}
stay = py.call(layers_stay, [planner.config, demand, planner.machine_state.free(demand.processes)]);
return py.either(allocation.recompute, () => py.both(stay, () => py.lt(py.len(allocation.residents), py.len(demand.layers))));
}, ["planner"]);
const _seconds = py.named(function(planner) {
let demand;
demand = planner.demand();
return py.call(seconds, [demand, planner.allocation(demand), planner.machine_state.machine.speeds]);
}, ["planner"]);
const _smaller = py.named(function*(planner, first) {
let choices, counts, enough, length, row_counts, tokens;
length = planner.shape.micro_batch.length;
counts = [first.rows, ...py.iter(py.call(_fewer_rows, [planner]))];
enough = py.max(1, py.sum((function*(t18) { for (const t19 of t18) { const rows = t19; yield py.ge(py.mul(rows, length), ENOUGH); } })(py.iter(counts))));
for (const t20 of py.iter([py.slice(counts, null, enough, null), ...py.iter((function*(t21) { for (const t22 of t21) { const rows = t22; yield [rows]; } })(py.iter(py.slice(counts, enough, null, null))))])) { row_counts = t20;
choices = (() => { const made$ = []; for (const t23 of py.iter(row_counts)) { const rows = t23; made$.push(py.replace(first, {rows: rows})); } return made$; })();
yield* py.iter(choices);
for (const t24 of py.iter(LESS)) { tokens = t24;
yield* py.iter((function*(t25) { for (const t26 of t25) { const choice = t26; if (py.has(tokens, py.call(_smaller_chunks, [py.call(cut, [planner, choice])]))) { yield py.replace(choice, {chunk_tokens: tokens}); } } })(py.iter(choices)));
}
}
}, ["planner", "first"]);
const _next_smaller = py.named(function*(planner) {
let choice, rows, tokens;
choice = py.call(choice_of, [planner]);
for (const t27 of py.iter(py.slice(py.call(_fewer_rows, [planner]), null, 1, null))) { rows = t27;
if (py.ge(py.mul(rows, planner.shape.micro_batch.length), ENOUGH)) {
yield py.replace(choice, {rows: rows});
}
}
for (const t28 of py.iter(py.call(_smaller_chunks, [planner]))) { tokens = t28;
if (py.eq(tokens, py.item(LESS, 0))) {
yield py.replace(choice, {chunk_tokens: tokens});
}
}
}, ["planner"]);
const _fewer_rows = py.named(function(planner) {
let config, counts, row_multiple, rows;
config = planner.config;
if (((planner.workload == null) || (config.micro_batch_size != null) || py.t(config.counts_tokens))) {
return [];
}
rows = planner.shape.micro_batch.rows;
row_multiple = py.call(rows_each, [config]);
counts = py.list();
while (py.gt(rows, row_multiple)) {
rows = py.max(row_multiple, py.mul(py.floordiv(py.floordiv(rows, 2), row_multiple), row_multiple));
py.append(counts, rows);
}
return counts;
}, ["planner"]);
const _smaller_chunks = py.named(function(planner) {
let work;
work = planner.workload;
if (((work == null) || (planner.config.loss_chunk_tokens != null))) {
return [];
}
if (py.le(planner.demand().working_bytes, work.most(0, planner.shape.num_micro_batches))) {
return [];
}
return (() => { const made$ = []; for (const t29 of py.iter(LESS)) { const tokens = t29; if (py.lt(tokens, planner.shape.micro_batch.tokens)) { made$.push(tokens); } } return made$; })();
}, ["planner"]);
const _heads = py.named(function(blueprint) {
if ((blueprint.head_in_pieces != null)) {
return [blueprint.head_in_pieces];
}
if ((blueprint.head.module == null)) {
return [false];
}
return (py.t(blueprint.head.asked) ? [true] : [false, true]);
}, ["blueprint"]);
const _expert_groups = py.named(function*(planner) {
let asked, automatic, blueprint, groups, most, runs_again, size, sizes, why;
asked = planner.config.experts_per_slot;
blueprint = planner.blueprint;
if ((blueprint.head_in_pieces != null)) {
yield [blueprint.experts, blueprint.runs_again];
return null;
}
automatic = py.eq(asked, "auto");
if (((asked == null) || (py.t(automatic) && (planner.config.device_memory == null)) || (blueprint.cut_experts == null))) {
yield [0, false];
return null;
}
if (py.t(automatic)) {
yield [0, false];
}
if (py.t((why = py.call(_why_not_grouped, [planner])))) {
if (py.t(automatic)) {
return null;
}
throw py.call(ConfigError, [["experts cannot be leased in groups: ", py.format(why, "")].join('')], {where: SETTING, how: "set it to null"});
}
most = blueprint.most_experts;
sizes = (py.t(py.isinstance(asked, py.int)) ? [asked] : (() => { const made$ = []; for (const t30 of py.iter(py.range(1, py.bit_length(most)))) { const halved = t30; made$.push(py.shr(most, halved)); } return made$; })());
groups = (() => { const made$ = []; for (const t31 of py.iter(sizes)) { const size = t31; if ((!py.t(automatic) || py.ge(py.mul(size, FEW_GROUPS), most))) { made$.push([size, false]); } } return made$; })();
groups = py.add(groups, (() => { const made$ = []; for (const t32 of py.iter(sizes)) { const size = t32; made$.push([size, true]); } return made$; })());
for (const t33 of py.iter(groups)) { ;[size, runs_again] = py.list(t33);
try {
blueprint.parts_of(size);
}
catch (caught) {
if (caught instanceof ConfigError) {
if (py.t(automatic)) {
return null;
}
throw caught;
} else
{ throw caught; }
}
yield [size, runs_again];
}
}, ["planner"]);
const _why_not_grouped = py.named(function(planner) {
let backend, blueprint, config, keeps_graphs, lacks_addresses, model_class, other_rows, reasons, without_experts;
config = planner.config;
blueprint = planner.blueprint;
backend = planner.backend;
keeps_graphs = (config.offloading_tier != null);
model_class = py.type(blueprint.model).__name__;
without_experts = ["a ", py.format(model_class, ""), " has no stacked experts, once in a layer"].join('');
other_rows = ["objective: ", py.format(config.objective, ""), " has other rows than those that train"].join('');
lacks_addresses = py.both((backend != null), () => (!py.t(py.call(has_addresses, [backend.device]))));
reasons = new Map([["torch_compile compiles whole layers", config.torch_compile], ["shard_weights gathers whole layers", config.shard_weights], ["gradient_checkpointing: false keeps the graphs of whole layers", (config.gradient_checkpointing === false)], ["activation_offloading keeps the graphs of whole layers", py.both(keeps_graphs, () => py.ne(config.activation_offloading, "hidden_states"))], [other_rows, py.ne(config.objective, "sft")], ["context_parallel_size takes parts of rows through whole layers", (config.context_parallel_size != null)], [without_experts, (!py.t(blueprint.most_experts))], ["several processes hold the model together", py.gt(blueprint.parallel.size, 1)], ["weights of the layers train", (blueprint.trained != null)], ["this device compiles every size of what it runs", lacks_addresses]]);
return py.next((function*(t35) { for (const t36 of t35) { const [what, applies] = py.list(t36); if (py.t(applies)) { yield what; } } })(py.iter(py.items(reasons))), "");
}, ["planner"]);
return {Choice, ENOUGH, FEW_GROUPS, LARGE, LESS, SETTING, SMALLEST, WORTH_IT, _best_sizes, _exceeds, _expert_groups, _fast_enough, _fastest, _fastest_chunks, _fewer_rows, _first_that_fits, _fitting, _heads, _in_groups, _in_memory, _largest, _measured, _next_smaller, _seconds, _sizes, _smaller, _smaller_chunks, _tile_sizes, _timings_of, _why_not_grouped, _with_chunk, _with_head, _with_keys, _with_tile, best, candidates, choice_of, cut, seconds_decide, with_work};
})();
const lema_plan_plan = (() => {
const math = stubs.math;
const bisect_left = stubs.bisect_left;
const asdict = stubs.asdict;
const dataclass = stubs.dataclass;
const field = stubs.field;
const is_dataclass = stubs.is_dataclass;
const replace = stubs.replace;
const cached_property = stubs.cached_property;
const LemaConfig = stubs.LemaConfig;
const human_bytes = lema_config_units.human_bytes;
const human_count = lema_config_units.human_count;
const Batches = stubs.Batches;
const TokenDataset = stubs.TokenDataset;
const beyond_positions = stubs.beyond_positions;
const num_positions = stubs.num_positions;
const PreferenceDataset = stubs.PreferenceDataset;
const CHUNK_TOKENS = stubs.CHUNK_TOKENS;
const Packs = stubs.Packs;
const packs_of = stubs.packs_of;
const ConfigError = stubs.ConfigError;
const MemoryLimitError = stubs.MemoryLimitError;
const with_adapter = stubs.with_adapter;
const ModelFiles = stubs.ModelFiles;
const training_rows = stubs.training_rows;
const main_dtype = stubs.main_dtype;
const uncounted = stubs.uncounted;
const Allocation = lema_plan_cost.Allocation;
const Demand = lema_plan_cost.Demand;
const crossover = lema_plan_cost.crossover;
const phases = lema_plan_cost.phases;
const saved_elsewhere = lema_plan_cost.saved_elsewhere;
const divided_note = stubs.divided_note;
const ExpertSummary = stubs.ExpertSummary;
const expert_summary = stubs.expert_summary;
const LongRows = stubs.LongRows;
const long_rows = stubs.long_rows;
const Machine = lema_plan_machine.Machine;
const Planner = stubs.Planner;
const StepNeeds = stubs.StepNeeds;
const planner_of = stubs.planner_of;
const timed = stubs.timed;
const Simulated = lema_plan_simulation_simulator.Simulated;
const chunks_note = stubs.chunks_note;
const StepShape = lema_plan_work_step.StepShape;
const step_shape = lema_plan_work_step.step_shape;
const tiles_note = stubs.tiles_note;
const MicroBatch = lema_plan_work_workload.MicroBatch;
const Workload = lema_plan_work_workload.Workload;
const grown = lema_plan_work_workload.grown;
const LIBRARY = stubs.LIBRARY;
const LayerBytes = stubs.LayerBytes;
const GB = py.pow(10, 9);
const BOTTLENECKS = new Map([["compute", "computing"], ["link", "the link"], ["disk", "the disk"]]);
const MOST_TOKENS = py.shl(1, 24);
const MOST_ADAPTERS = 1024;
const CURVE = 33;
class PlannedMemory {
constructor(device, host, disk, device_limit, host_limit) { this.device = device; this.host = host; this.disk = disk; this.device_limit = device_limit; this.host_limit = host_limit; }
}
PlannedMemory.isClass = true;
PlannedMemory.sig = ["device", "host", "disk", "device_limit", "host_limit"];
PlannedMemory.fields = PlannedMemory.sig;
class Headroom {
constructor(crossover, largest_micro_batch, largest_step, gigabyte_on_device, gigabyte_in_host, adapter_bytes, adapters) { this.crossover = crossover; this.largest_micro_batch = largest_micro_batch; this.largest_step = largest_step; this.gigabyte_on_device = gigabyte_on_device; this.gigabyte_in_host = gigabyte_in_host; this.adapter_bytes = adapter_bytes; this.adapters = adapters; }
}
Headroom.isClass = true;
Headroom.sig = ["crossover", "largest_micro_batch", "largest_step", "gigabyte_on_device", "gigabyte_in_host", "adapter_bytes", "adapters"];
Headroom.fields = Headroom.sig;
class Epoch {
constructor(rows, tokens, steps, hours, cost, run_steps, packed_hours) { this.rows = rows; this.tokens = tokens; this.steps = steps; this.hours = hours; this.cost = cost; this.run_steps = run_steps; this.packed_hours = packed_hours; }
get run_hours() {
const self = this;
return py.div(py.mul(self.hours, self.run_steps), self.steps);
}
}
Epoch.isClass = true;
Epoch.sig = ["rows", "tokens", "steps", "hours", "cost", "run_steps", "packed_hours"];
Epoch.fields = Epoch.sig;
class Plan {
constructor(machine, measured, itemsize, tokens, micro_batch, allocation, memory, step, epoch, experts, notes, needs) { this.machine = machine; this.measured = measured; this.itemsize = itemsize; this.tokens = tokens; this.micro_batch = micro_batch; this.allocation = allocation; this.memory = memory; this.step = step; this.epoch = epoch; this.experts = experts; this.notes = notes; this.needs = needs; }
get room() { return py.once(this, 'room', () => {
const self = this;
return py.call(_headroom, [py.bound(self, 'needs'), py.bound(self, 'memory'), py.bound(self, 'step').seconds]);
}); }
get crossover() {
const self = this;
return py.call(_crossover, [py.bound(self, 'needs')]);
}
get host_peak() {
const self = this;
let memory, on_device;
memory = py.bound(self, 'memory');
on_device = py.mul(py.sub(py.bound(self, 'step').device_peak, py.item(memory.device, "slots")), self.machine.shared);
return py.add(py.sum(py.values(memory.host)), on_device);
}
get fits() {
const self = this;
let machine;
machine = self.machine;
return py.both(py.le(py.bound(self, 'step').device_peak, machine.device_memory), () => py.le(self.host_peak, machine.host_memory));
}
get verdict() {
const self = this;
let gain, how, packed, taken, tokens;
taken = [py.format(py.call(human_bytes, [py.bound(self, 'step').device_peak]), ""), " of ", py.format(py.call(human_bytes, [py.bound(self, 'memory').device_limit]), ""), " of device memory"].join('');
if (!py.t(py.bound(self, 'fits'))) {
how = "lower max_length or batch_size, or set gradient_checkpointing and device_memory: auto";
return ["does not fit: it needs ", py.format(taken, ""), " and ", py.format(py.call(human_bytes, [self.host_peak]), ""), " of host memory; ", py.format(how, "")].join('');
}
if (!py.t(py.bound(self, 'step').seconds)) {
return ["fits, with ", py.format(taken, "")].join('');
}
packed = ((self.epoch == null) ? null : self.epoch.packed_hours);
gain = (((self.epoch == null) || !py.t(packed)) ? null : py.div(self.epoch.hours, packed));
tokens = ((self.epoch == null) ? self.tokens : py.div(self.epoch.tokens, self.epoch.steps));
return py.add(["fits, with ", py.format(taken, ""), "; "].join(''), py.call(_limited, [py.item(BOTTLENECKS, py.bound(self, 'step').bottleneck), self.crossover, tokens, gain]));
}
get tokens_per_second() {
const self = this;
return (py.t(py.bound(self, 'step').seconds) ? py.div(self.tokens, py.bound(self, 'step').seconds) : null);
}
}
Plan.isClass = true;
Plan.sig = ["machine", "measured", "itemsize", "tokens", "micro_batch", "allocation", "memory", "step", "epoch", "experts", "notes", "needs"];
Plan.fields = Plan.sig;
const plan_with = py.named(function(planner, price = null, trust_remote_code = false, data = null) {
let allocation, demand, experts, memory, needs, shape, step;
needs = planner.needs();
demand = py.bound(needs, 'demand');
allocation = py.bound(needs, 'allocation');
step = planner.simulated(demand, allocation);
memory = py.call(_memory, [needs]);
experts = null;
if ((planner.workload != null)) {
shape = planner.shape;
experts = py.call(expert_summary, [planner.blueprint, shape.micro_batch, shape.tokens]);
}
return py.call(Plan, [], {machine: planner.machine_state.machine, measured: py.eq(planner.machine_state.speeds, "measured"), itemsize: py.call(main_dtype, [planner.blueprint.model]).itemsize, tokens: planner.shape.tokens, micro_batch: planner.shape.micro_batch, allocation: allocation, memory: memory, step: step, epoch: py.call(_epoch, [needs, price, trust_remote_code, data]), experts: experts, notes: [...py.iter(py.call(_notes, [planner])), ...py.iter(((experts == null) ? [] : [experts.note]))], needs: needs});
}, ["planner", "price", "trust_remote_code", "data"]);
const _crossover = py.named(function(needs) {
return py.call(crossover, [py.bound(needs, 'demand'), py.bound(needs, 'allocation'), needs.planner.machine_state.machine.speeds, needs.planner.shape.tokens]);
}, ["needs"]);
const _limited = py.named(function(by, hidden, tokens, gain) {
let message;
message = ["a step is limited by ", py.format(by, "")].join('');
if (((hidden != null) && py.lt(tokens, hidden))) {
message = py.add(message, [": ", py.format(py.call(human_count, [tokens]), ""), " tokens a step, and reading is hidden from ", py.format(py.call(human_count, [hidden]), ""), " on: "].join(''));
message = py.add(message, "tokens_per_step: auto would cost less time");
}
return py.add(message, (((gain != null) && py.gt(gain, 1.5)) ? ["; packing: true would take about ", py.format(gain, [".2g"].join('')), " times less"].join('') : ""));
}, ["by", "hidden", "tokens", "gain"]);
const _epoch = py.named(function(needs, price, trusted, data) {
let all_steps, as_packs, batched_rows, batches, config, cost, counts, filled, hours, hours_of, length, multiple, options, packed, planner, preferences, rows, steps, tokens;
planner = needs.planner;
config = needs.planner.config;
length = needs.planner.shape.micro_batch.length;
if (!py.t(config.train_data)) {
return null;
}
if ((data == null)) {
data = py.call(_data, [planner, trusted]);
}
preferences = py.ne(config.objective, "sft");
counts = data.counts;
batched_rows = data;
if (py.t(config.packing)) {
batched_rows = py.call(packs_of, [data, length, config]);
counts = py.replace(counts, {rows: py.len(batched_rows)});
}
rows = counts.rows;
tokens = counts.tokens;
steps = math.ceil(py.div(rows, planner.shape.num_rows));
all_steps = math.ceil(py.mul(config.num_train_epochs, steps));
if (py.eq(config.count_steps_by, "rows")) {
all_steps = math.ceil(py.div(py.mul(config.num_train_epochs, rows), planner.shape.num_rows));
}
filled = py.div(tokens, py.mul(rows, length));
if (py.t(py.isinstance(config.tokens_per_step, py.int))) {
options = new Map([["tokens", config.tokens_per_step], ["per_step", config.group_by_length]]);
multiple = py.either(config.pad_to_multiple_of, () => 1);
batches = py.call(Batches, [batched_rows, 1, config.seed, config.shuffle], {multiple: multiple, ...py.object(options)});
steps = batches.before(1);
all_steps = batches.num_batches(config.num_train_epochs);
filled = py.div(tokens, py.mul(steps, planner.shape.tokens));
}
hours_of = py.named(function(count, filled) {
return py.div(py.mul(count, planner.simulated(py.method(planner, 'demand', [], {scale: filled}), py.bound(needs, 'allocation')).seconds), 3600);
}, ["count", "filled"]);
hours = py.call(hours_of, [steps, filled], {});
as_packs = (!(py.t(config.packing) || py.t(preferences) || py.t(config.tokens_per_step)));
packed = (py.t(as_packs) ? py.call(hours_of, [(-py.floordiv((-tokens), planner.shape.tokens)), 1.0], {}) : null);
cost = ((price == null) ? null : py.mul(price, hours));
return new Epoch(rows, tokens, steps, hours, cost, py.either(config.max_steps, () => all_steps), packed);
}, ["needs", "price", "trusted", "data"]);
const _memory = py.named(function(needs) {
let allocation, checkpoint, demand, model, on_disk, planner, saved, spilled;
planner = needs.planner;
demand = py.bound(needs, 'demand');
allocation = py.bound(needs, 'allocation');
spilled = py.mul(py.mul(py.len(py.bound(demand, 'keeping')), demand.boundary_bytes), py.eq(allocation.boundaries, "disk"));
saved = py.mul(py.sum(py.values(py.call(saved_elsewhere, [demand, allocation]))), py.eq(allocation.saved_on, "disk"));
model = planner.blueprint.stored_bytes;
checkpoint = planner.blueprint.checkpoint_bytes;
on_disk = new Map([["model", model], ["boundaries", spilled], ["saved", saved], ["checkpoint", checkpoint]]);
return new PlannedMemory(needs.device, py.or_(needs.host, new Map([["process", planner.machine_state.process_bytes]])), on_disk, ...py.iter(py.bound(planner, 'limits')));
}, ["needs"]);
const _headroom = py.named(function(needs, memory, seconds) {
let adapter, bought, config, demand, in_host, micro, on_device, planner, saved_by, step_fits, without;
planner = needs.planner;
demand = py.bound(needs, 'demand');
bought = math.ceil(py.div(py.max((function*(t1) { for (const t2 of t1) { const layer = t2; yield layer.nbytes; } })(py.iter(planner.blueprint.layers))), GB));
saved_by = py.named(function(setting, used) {
let richer;
richer = py.method(planner, 'allocation', [demand], {...py.object(new Map([[setting, py.add(used, py.mul(bought, GB))]]))});
return py.div(py.max(0.0, py.sub(seconds, planner.simulated(demand, richer).seconds)), bought);
}, ["setting", "used"]);
step_fits = py.named(function(count) {
return planner.fits(planner.demand(new StepShape(micro, py.mul(count, micro.rows))));
}, ["count"]);
config = planner.config;
micro = planner.shape.micro_batch;
adapter = ((planner.blueprint.trained == null) ? planner.blueprint.adapter_bytes : 0);
without = py.replace(demand, {adapter_bytes: py.sub(demand.adapter_bytes, adapter)});
on_device = ((config.device_memory == null) ? py.sum(py.values(memory.device)) : memory.device_limit);
in_host = ((config.host_memory == null) ? py.sum(py.values(needs.host)) : memory.host_limit);
return py.call(Headroom, [], {crossover: py.call(_crossover, [needs]), largest_micro_batch: py.call(_largest_micro_batch, [planner]), largest_step: py.mul(py.call(_largest, [step_fits, py.floordiv(MOST_TOKENS, micro.tokens)]), micro.tokens), gigabyte_on_device: py.call(saved_by, ["device_memory", on_device], {}), gigabyte_in_host: py.call(saved_by, ["host_memory", in_host], {}), adapter_bytes: adapter, adapters: py.call(most_adapters, [planner, without, adapter])});
}, ["needs", "memory", "seconds"]);
const most_adapters = py.named(function(planner, demand, nbytes) {
let adapters_fit;
adapters_fit = py.named(function(count) {
return planner.fits(py.replace(demand, {adapter_bytes: py.add(demand.adapter_bytes, py.mul(count, nbytes))}));
}, ["count"]);
return (py.t(nbytes) ? py.call(_largest, [adapters_fit, MOST_ADAPTERS]) : 0);
}, ["planner", "demand", "nbytes"]);
const _largest_micro_batch = py.named(function(planner) {
let at_once, fits, micro_batch, one_row, two;
micro_batch = planner.shape.micro_batch;
;[one_row, two] = py.list((function*(t3) { for (const t4 of t3) { const rows = t4; yield planner.work(py.replace(micro_batch, {rows: rows})); } })(py.iter([1, 2])));
at_once = py.max(1, py.floordiv(py.either(planner.config.loss_chunk_tokens, () => CHUNK_TOKENS), micro_batch.length));
fits = py.named(function(rows) {
let shape;
shape = new StepShape(py.replace(micro_batch, {rows: rows}), py.max(rows, planner.shape.num_rows));
return planner.fits(planner.demand(shape, py.call(_of_rows, [one_row, two, rows, at_once]), py.div(rows, micro_batch.rows)));
}, ["rows"]);
return py.call(_largest, [fits, py.floordiv(MOST_TOKENS, micro_batch.length)]);
}, ["planner"]);
const _of_rows = py.named(function(one_row, two, rows, rows_at_once) {
let chunk, in_host, more, pieces, workload;
workload = py.call(grown, [one_row, two, rows]);
chunk = py.call(grown, [one_row, two, py.min(rows, rows_at_once)]);
pieces = workload.pieces;
if (((pieces != null) && (chunk.pieces != null))) {
more = py.sub(pieces.waiting_bytes, chunk.pieces.waiting_bytes);
pieces = py.replace(pieces, {working_bytes: py.add(py.bound(chunk.pieces, 'working_bytes'), more)});
}
in_host = workload.in_host;
if ((in_host != null)) {
in_host = py.replace(in_host, {head: chunk.head});
}
return py.replace(workload, {head: chunk.head, pieces: pieces, in_host: in_host});
}, ["one_row", "two", "rows", "rows_at_once"]);
const _largest = py.named(function(fits, most) {
let high, left;
high = 1;
while ((py.le(high, most) && py.t(py.call(fits, [high], {})))) {
high = py.mul(high, 2);
}
left = py.range(py.add(py.floordiv(high, 2), 1), py.min(high, py.add(most, 1)));
return py.add(py.floordiv(high, 2), py.call(bisect_left, [left, true], {key: ((number) => ((!py.t(py.call(fits, [number], {})))))}));
}, ["fits", "most"]);
const _notes = stubs._notes;
return {BOTTLENECKS, CURVE, Epoch, GB, Headroom, MOST_ADAPTERS, MOST_TOKENS, Plan, PlannedMemory, _crossover, _epoch, _headroom, _largest, _largest_micro_batch, _limited, _memory, _notes, _of_rows, most_adapters, plan_with};
})();
