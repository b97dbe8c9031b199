// The page of `mesh dashboard`: it asks its server once a second while it is visible. All that proxies report
// may be hostile: it becomes text nodes and attributes, never markup. The place is in the fragment of the URL:
// #token=...&workload=NAMESPACE/NAME&why=ID, or why=FROM TO.
"use strict";

const INTERVAL_MS = 1000;
const STALE_MS = 5000;
// Larger meshes begin with the table.
const LARGE_MESH = 60;
const MAX_NODES = 300;
// Edges with a label, if none is selected.
const MAX_LABELS = 40;
const COLUMN_NODES = 24;
const NODE = { width: 170, maxWidth: 330, height: 44, gap: 20, columnGap: 190, group: 22, margin: 24 };
// The height of the place of a line between the nodes of a column.
const LINE = 12;
const MIN_SCALE = 0.75;
const HEALTHY = 0.99;

const byId = (id) => document.getElementById(id);
const place = () => new URLSearchParams(location.hash.slice(1));
let traffic = null;
let receivedAt = 0;
let failure = "";
let sorted = { workloads: [3, 1], edges: [4, 1], routes: [2, 1], tcp: [7, 1] };
let layout = { key: null, positions: new Map(), places: new Map(), groups: [] };

// Elements

function make(namespace, name, attributes, children) {
  const node = document.createElementNS(namespace, name);
  set(node, attributes);
  node.append(...children);
  return node;
}
const html = (name, attributes = {}, ...children) => make("http://www.w3.org/1999/xhtml", name, attributes, children);
const svg = (name, attributes = {}, ...children) => make("http://www.w3.org/2000/svg", name, attributes, children);

function set(node, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null) node.removeAttribute(name);
    else if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
  }
}

function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// The children of `parent` become those of `items`. A key keeps its element, and the element its focus.
function patch(parent, items, key, create, update) {
  const focused = document.activeElement;
  const earlier = parent.kept || new Map();
  const keys = new Set(items.map(key));
  for (const [id, node] of earlier) if (!keys.has(id)) node.remove();
  parent.kept = new Map();
  let next = parent.firstChild;
  for (const item of items) {
    const node = earlier.get(key(item)) || create(item);
    parent.kept.set(key(item), node);
    if (node === next) next = node.nextSibling;
    else parent.insertBefore(node, next);
    update(node, item);
  }
  if (focused !== document.activeElement && focused.isConnected) focused.focus();
}

// Places

function link(change) {
  const next = place();
  for (const [name, value] of Object.entries(change)) value === null ? next.delete(name) : next.set(name, value);
  return "#" + next;
}
const isWorkload = (name) => /^[a-z0-9.-]+\/[a-z0-9.-]+$/.test(name);
const workloadLink = (name) => (isWorkload(name) ? link({ workload: name, why: null }) : null);
const hasFailures = (row) => row.success < 1;
// A caller without a name has no proxy: the callee has the exchange.
function whyLink(edge) {
  if (!hasFailures(edge)) return null;
  const known = isWorkload(edge.from) && isWorkload(edge.to);
  return known ? link({ why: `${edge.from} ${edge.to}` }) : workloadLink(edge.to);
}

// Values

const perSecond = (row) => (row.requests_per_second < 10 ? row.requests_per_second.toFixed(1) : String(Math.round(row.requests_per_second)));
// Rounded down: 100% means all. Shares are sums of floating-point numbers.
const percent = (share) => `${Math.floor(Math.round(share * 1e6) / 1e3) / 10}%`;
const milliseconds = (value) => (value < 10 ? value.toFixed(1) : String(Math.round(value)));
const level = (row) => (!hasFailures(row) ? "good" : row.success < HEALTHY ? "bad" : "warn");
const MARKS = { good: "", warn: "▲ ", bad: "✕ " };
const health = (row) => MARKS[level(row)] + percent(row.success);
const isTcp = (row) => row.connections !== undefined;
const kilobytes = (value) => (value / 1e3).toFixed(1);
const mutualTls = (row) => (row.mutual_tls === 1 ? "all with mutual TLS" : `${percent(row.mutual_tls)} with mutual TLS`);
const describe = (row) => isTcp(row) ? `${row.connections} TCP connections, ${mutualTls(row)}` : `${perSecond(row)} requests per second, ${percent(row.success)} succeed, p95 ${milliseconds(row.p95_ms)} ms, ` +
  mutualTls(row);

// Tables

const column = (label, value, more = {}) => ({ label, value, text: (row) => String(value(row)), ...more });
const number = (label, value, text = (row) => String(value(row))) => column(label, value, { text, type: "number" });
const RATES = [
  number("Requests/s", (row) => row.requests_per_second, perSecond),
  column("Success", (row) => row.success, { text: health, type: level }),
  column("Mutual TLS", (row) => row.mutual_tls, { text: (row) => (row.mutual_tls === 1 ? "all" : percent(row.mutual_tls)) }),
  number("p50 ms", (row) => row.p50_ms, (row) => milliseconds(row.p50_ms)),
  number("p95 ms", (row) => row.p95_ms, (row) => milliseconds(row.p95_ms)),
  number("p99 ms", (row) => row.p99_ms, (row) => milliseconds(row.p99_ms)),
];
const why = (href) => column("Failures", (row) => row.success, { text: (row) => (hasFailures(row) ? "Why?" : ""), href });
const TABLES = {
  workloads: { title: "Workloads", columns: [column("Workload", (row) => row.name, { href: (row) => workloadLink(row.name) }), ...RATES,
    why((row) => (hasFailures(row) ? workloadLink(row.name) : null))] },
  edges: { title: "Calls", columns: [column("From", (row) => row.from, { href: (row) => workloadLink(row.from) }),
    column("To", (row) => row.to, { href: (row) => workloadLink(row.to) }), ...RATES, why(whyLink)] },
  tcp: { title: "TCP connections", columns: [column("From", (row) => row.from, { href: (row) => workloadLink(row.from) }),
    column("To", (row) => row.to, { href: (row) => workloadLink(row.to) }), number("Connections", (row) => row.connections),
    number("Open", (row) => row.open), number("Sent kB/s", (row) => row.sent_bytes_per_second, (row) => kilobytes(row.sent_bytes_per_second)),
    number("Received kB/s", (row) => row.received_bytes_per_second, (row) => kilobytes(row.received_bytes_per_second)), RATES[2]] },
  routes: { title: "Routes", columns: [column("Route", (row) => row.name), ...RATES] },
};

function renderTables(shown) {
  const names = Object.keys(TABLES).filter((name) => shown[name].length);
  patch(byId("table"), names, (name) => name, createTable, (box, name) => {
    const { columns } = TABLES[name];
    const [by, direction] = sorted[name];
    const value = columns[by - 1].value;
    const order = (a, b) => (a < b ? -1 : a > b ? 1 : 0);
    const rows = [...shown[name]].sort((a, b) => direction * order(value(a), value(b)) || order(rowKey(a), rowKey(b)));
    const [head, body] = [box.querySelector("tr"), box.querySelector("tbody")];
    [...head.children].forEach((cell, index) => set(cell, { "aria-sort": index + 1 !== by ? "none" : direction > 0 ? "ascending" : "descending" }));
    patch(body, rows, rowKey, () => html("tr", {}, ...columns.map((one) => html("td", {}, ...(one.href ? [html("a")] : [])))), (row, item) =>
      columns.forEach((one, index) => renderCell(row.children[index], one, item)));
  });
}

const rowKey = (row) => (row.name ?? `${row.from} ${row.to}`) + (isTcp(row) ? " TCP" : "");

function createTable(name) {
  const { title, columns } = TABLES[name];
  const heads = columns.map(({ label }, index) => {
    const button = html("button", { type: "button" }, label);
    button.addEventListener("click", () => {
      const [by, direction] = sorted[name];
      sorted[name] = [index + 1, by === index + 1 ? -direction : 1];
      render();
    });
    return html("th", { scope: "col" }, button);
  });
  return html("div", { class: "scroll" }, html("table", { id: `table-${name}` }, html("caption", {}, title),
    html("thead", {}, html("tr", {}, ...heads)), html("tbody")));
}

function renderCell(cell, { text, type, href }, row) {
  set(cell, { class: typeof type === "function" ? type(row) : type ?? null });
  const target = href ? cell.firstElementChild : cell;
  setText(target, text(row));
  if (href) set(target, { href: href(row), "aria-label": text(row) === "Why?" ? `Why did requests fail: ${rowKey(row)}` : null });
}

// Graph

// Callers left of callees: the longest path from a node without callers. Calls back to an earlier node do not count.
function ranks(names, callees) {
  const [order, seen, called] = [[], new Set(), new Set()];
  for (const [name, all] of callees) all.forEach((to) => to !== name && called.add(to));
  function visit(name) {
    if (seen.has(name)) return;
    seen.add(name);
    callees.get(name).forEach(visit);
    order.unshift(name);
  }
  [...names.filter((name) => called.has(name)), ...names.filter((name) => !called.has(name))].reverse().forEach(visit);
  const [rank, position] = [new Map(names.map((name) => [name, 0])), new Map(order.map((name, index) => [name, index]))];
  for (const name of order) for (const to of callees.get(name)) {
    if (position.get(to) > position.get(name)) rank.set(to, Math.max(rank.get(to), rank.get(name) + 1));
  }
  return rank;
}

// The members of a column: by namespace, each as near as possible to its callers in earlier columns.
function orderColumn(members, namespace, edges, at) {
  const mean = (isMember) => {
    const callers = edges.filter(({ from, to }) => at.has(from) && isMember(to));
    return callers.reduce((sum, { from }) => sum + at.get(from), 0) / (callers.length || 1);
  };
  const groups = new Map([...new Set(members.map(namespace))].map((group) =>
    [group, mean((name) => members.includes(name) && namespace(name) === group)]));
  const order = (name) => [groups.get(namespace(name)), namespace(name), mean((to) => to === name), name];
  const keys = new Map(members.map((name) => [name, order(name)]));
  const compare = (one, other) => one.reduce((sign, value, index) => sign || (value < other[index] ? -1 : value > other[index] ? 1 : 0), 0);
  return members.sort((one, other) => compare(keys.get(one), keys.get(other)));
}

// A line over several columns has a place in each one between them, so that no node hides it. Returns the lines in
// parts from column to column, and the places of each line. Adds their ranks.
function placeLines(edges, rank) {
  const [parts, places] = [[], new Map()];
  for (const { from, to } of edges) {
    const line = `${from} ${to}`;
    if (places.has(line)) continue;
    places.set(line, []);
    for (let level = rank.get(from) + 1; level < rank.get(to); level++) {
      places.get(line).push(`${line} ${level}`);
      rank.set(`${line} ${level}`, level);
    }
    const all = [from, ...places.get(line), to];
    all.slice(1).forEach((name, index) => parts.push({ from: all[index], to: name }));
  }
  return { parts, places };
}

// The width of a node that has the whole name, if that is not too long.
const measure = document.createElement("canvas").getContext("2d");
function nodeWidth(names) {
  measure.font = "13px system-ui, sans-serif";
  const longest = Math.max(0, ...names.map((name) => measure.measureText(shortName(name)).width));
  return Math.min(NODE.maxWidth, Math.max(NODE.width, Math.ceil(longest) + 24));
}

const shortName = (name) => {
  const short = name.slice(name.indexOf("/") + 1);
  return short.length > 40 ? short.slice(0, 39) + "…" : short;
};

function arrange(names, arrows) {
  const callees = new Map(names.map((name) => [name, []]));
  const between = arrows.filter(({ from, to }) => callees.has(from) && callees.has(to));
  for (const { from, to } of between) callees.get(from).push(to);
  const rank = ranks(names, callees);
  const { parts: edges, places } = placeLines(between, rank);
  const isLine = (name) => !callees.has(name);
  const namespace = (name) => (isLine(name) ? "" : name?.includes("/") ? name.split("/")[0] : "outside");
  const nodeHeight = (name) => (isLine(name) ? LINE : NODE.height);
  const ranked = [...names, ...[...places.values()].flat()];
  const box = nodeWidth(names);
  const [columns, at] = [[], new Map()];
  for (let level = 0; level <= Math.max(...rank.values()); level++) {
    const members = orderColumn(ranked.filter((name) => rank.get(name) === level), namespace, edges, at);
    members.forEach((name, index) => at.set(name, index));
    for (let start = 0; start < members.length; start += COLUMN_NODES) columns.push(members.slice(start, start + COLUMN_NODES));
  }
  const [positions, groups] = [new Map(), []];
  const begins = (members, index) => !isLine(members[index]) && (index === 0 || namespace(members[index]) !== namespace(members[index - 1]));
  const heights = columns.map((members) => members.reduce((sum, name, index) =>
    sum + nodeHeight(name) + NODE.gap + (begins(members, index) ? NODE.group : 0), 0));
  const height = Math.max(0, ...heights);
  columns.forEach((members, column) => {
    const x = NODE.margin + column * (box + NODE.columnGap);
    let y = NODE.margin + (height - heights[column]) / 2;
    members.forEach((name, index) => {
      if (begins(members, index)) groups.push({ text: namespace(name), x, y: (y += NODE.group) - 8 });
      positions.set(name, { x, y });
      y += nodeHeight(name) + NODE.gap;
    });
  });
  const width = columns.length * (box + NODE.columnGap) - NODE.columnGap;
  return { positions, places, groups, box, width: width + 2 * NODE.margin, height: height + 2 * NODE.margin };
}

function renderGraph(shown, selected) {
  const rows = new Map(shown.workloads.map((row) => [row.name, row]));
  const arrows = [...shown.edges, ...shown.tcp, ...shown.leads];
  const all = [...new Set([...rows.keys(), ...arrows.flatMap(({ from, to }) => [from, to])])].sort();
  const names = all.slice(0, MAX_NODES);
  const key = JSON.stringify(names);
  if (layout.key !== key) layout = { key, ...arrange(names, arrows) };
  const { width, height } = layout;
  const scale = Math.min(1, Math.max(MIN_SCALE, byId("canvas").parentElement.clientWidth / width));
  set(byId("canvas"), { width: width * scale, height: height * scale, viewBox: `0 0 ${width} ${height}` });
  const isShown = ({ from, to }) => layout.positions.has(from) && layout.positions.has(to);
  const [edges, leads] = [[...shown.edges, ...shown.tcp].filter(isShown), shown.leads.filter(isShown)];
  const neighbours = new Set([selected, ...arrows.flatMap(({ from, to }) => (from === selected ? [to] : to === selected ? [from] : []))]);
  const away = (isNear) => (layout.positions.has(selected) && !isNear ? " away" : "");
  patch(byId("groups"), layout.groups, ({ text, x, y }) => `${x} ${y} ${text}`, ({ text, x, y }) => svg("text", { class: "group", x, y }, text), () => {});
  patch(byId("nodes"), names, (name) => name, createNode, (node, name) => {
    const row = rows.get(name);
    const { x, y } = layout.positions.get(name);
    const state = (row && level(row) === "bad" ? " failing" : "") + (name === selected ? " selected" : "") + away(neighbours.has(name));
    const workloads = leads.filter(({ from }) => from === name).map(({ to }) => to);
    const label = row ? describe(row) : workloads.length ? `Service of ${workloads.join(", ")}` : "no inbound requests";
    set(node, { class: "node" + state, transform: `translate(${x} ${y})`, href: workloadLink(name), "aria-label": `${name}: ${label}` });
    set(node.firstChild, { width: layout.box });
    setText(node.querySelector(".rate"), row ? `${perSecond(row)}/s · ${health(row)} · ${milliseconds(row.p95_ms)} ms` : workloads.length ? "Service" : label);
  });
  patch(byId("leads"), leads, rowKey, () => svg("path"), (node, lead) =>
    set(node, { class: `lead${away(lead.from === selected || lead.to === selected)}`, d: curve(lead) }));
  const labels = new Map();
  patch(byId("edges"), edges, rowKey, createEdge, (node, edge) => {
    const isNear = edge.from === selected || edge.to === selected;
    // Labels of calls to the same node are above each other.
    const above = isNear || edges.length <= MAX_LABELS ? labels.get(edge.to) ?? 0 : null;
    if (above !== null) labels.set(edge.to, above + 1);
    renderEdge(node, edge, away(isNear), above);
  });
  return all.length - names.length;
}

const createNode = (name) => svg("a", {}, svg("rect", { height: NODE.height, rx: 8 }), svg("title", {}, name),
  svg("text", { x: 12, y: 18 }, shortName(name)), svg("text", { class: "rate quiet", x: 12, y: 36 }));

const createEdge = () => svg("a", {}, svg("title"), svg("path", { class: "flow" }), svg("path", { class: "tip" }),
  svg("g", { class: "note" }, svg("path"), svg("text", { class: "label", x: 12, y: 4 })));

// From the right of a node to the left of another one.
function ends({ from, to }) {
  const [one, other] = [layout.positions.get(from), layout.positions.get(to)];
  return [one.x + layout.box, one.y + NODE.height / 2, other.x - 8, other.y + NODE.height / 2];
}

function curve(edge) {
  const [x1, y1, x2, y2] = ends(edge);
  const places = (layout.places.get(`${edge.from} ${edge.to}`) ?? []).map((place) => layout.positions.get(place));
  let [path, x, y] = [`M${x1} ${y1}`, x1, y1];
  const bendTo = (toX, toY) => {
    const bend = toX > x ? (toX - x) / 2 : 90;
    path += `C${x + bend} ${y} ${toX - bend} ${toY} ${toX} ${toY}`;
  };
  for (const place of places) {
    bendTo(place.x, place.y + LINE / 2);
    path += `h${layout.box}`;
    [x, y] = [place.x + layout.box, place.y + LINE / 2];
  }
  bendTo(x2, y2);
  return path;
}

function renderEdge(node, edge, away, above) {
  const [title, flow, tip, note] = node.children;
  const [, , x2, y2] = ends(edge);
  const bad = hasFailures(edge);
  const text = `${edge.from} to ${edge.to}: ${describe(edge)}`;
  set(node, { class: `edge${bad ? " failing" : ""}${away}`, href: whyLink(edge), role: bad ? null : "img", "aria-label": text });
  setText(title, text);
  set(flow, { d: curve(edge), "stroke-width": 1.5 + Math.min(5, Math.log10(1 + (edge.requests_per_second ?? 0)) * 2) });
  set(tip, { d: `M${x2 + 6} ${y2}l-10 -6v12z` });
  set(note, { transform: `translate(${x2 - NODE.columnGap + 16} ${y2 - 14 - above * 15})`, visibility: above === null ? "hidden" : null });
  const closed = edge.mutual_tls === 1;
  set(note.children[0], { class: closed ? "lock" : "lock open", d: `M-4 0h9v7h-9zM-2 0v-3a2.5 2.5 0 0 1 5 0${closed ? "v3" : ""}` });
  setText(note.children[1], isTcp(edge) ? `${edge.connections} TCP` : `${perSecond(edge)}/s ${milliseconds(edge.p95_ms)} ms${bad ? " ✕ " + percent(1 - edge.success) : ""}`);
}

// A workload

const list = ({ items, omitted }) => [...items, ...(omitted ? [`${omitted} more`] : [])].join(", ") || "none";
const terms = (pairs) => html("dl", {}, ...pairs.filter(([, value]) => value).flatMap(([name, value]) => [html("dt", {}, name), html("dd", {}, value)]));
const grid = (title, heads, rows) => html("div", { class: "scroll" }, html("table", {}, html("caption", {}, title),
  html("thead", {}, html("tr", {}, ...heads.map((head) => html("th", { scope: "col" }, head)))),
  html("tbody", {}, ...rows.map((cells) => html("tr", {}, ...cells.map((cell) => (cell instanceof Node ? html("td", {}, cell) : html("td", {}, cell ?? ""))))))));

async function showWorkload(name, moveFocus) {
  byId("workload").hidden = !name;
  if (!name) return;
  const content = byId("workload-content");
  setText(byId("workload-name"), name);
  setText(byId("workload-status"), "Asking its proxies");
  set(byId("leave"), { href: link({ workload: null }) });
  if (moveFocus) {
    content.replaceChildren();
    byId("workload-name").focus();
  }
  const parts = await ask(`/api/workload?name=${encodeURI(name)}`).then(workloadParts, (error) => [html("p", { class: "bad" }, error.message)]);
  if (place().get("workload") !== name) return;
  content.replaceChildren(...parts);
  setText(byId("workload-status"), `As of ${new Date().toLocaleTimeString()}`);
}

function workloadParts({ exchanges, pods, omitted }) {
  const rows = exchanges.map((one) => [one.time, one.direction, one.with, one.subject, outcome(one), `${milliseconds(one.duration_ms)} ms`,
    one.is_failure && one.id ? html("a", { href: link({ why: one.id }), "aria-label": `Why did ${one.subject} fail at ${one.time}` }, "Why?") : ""]);
  const table = grid("Recent exchanges", ["Time", "Direction", "Peer", "Request", "Result", "Duration", "Failure"], rows);
  const more = omitted ? [html("p", { class: "quiet" }, `${omitted} more pods are not asked.`)] : [];
  return [exchanges.length ? table : html("p", {}, "Its proxies know no recent exchange."), ...pods.flatMap(podParts), ...more];
}

const outcome = (one) => html("span", { class: one.is_failure ? "bad" : "good" }, (one.is_failure ? "✕ " : "") + (one.failure ?? one.status ?? "no response"));

function podParts({ pod, state, error }) {
  const title = html("h3", {}, `Pod ${pod}`);
  const errors = error ? [html("p", { class: "bad" }, error)] : [];
  if (!state) return [title, ...errors];
  const { certificate, discovery, inbound } = state;
  const mode = inbound && (inbound.pending ? "no configuration yet: no client may call" : inbound.strict ? "only callers with mutual TLS" : "callers with and without mutual TLS");
  const facts = terms([
    ["Certificate", certificate ? `${certificate.identity}, valid until ${certificate.not_after}` : "✕ none that is valid"],
    ["Controller", discovery ? (discovery.connected ? "connected" : "✕ not connected") : "✕ no response in time"],
    ["Not ready", discovery?.unready],
    ["Inbound", mode],
    ["Policies", inbound && (inbound.authorization ? list(inbound.authorization) : "none: all calls are allowed")],
    ["Egress", inbound?.egress && list(inbound.egress)],
    ["Rate limits", inbound && list(inbound.rate_limits)],
  ]);
  const workers = state.workers.map(({ destinations }, index) => grid(`Destinations of worker ${index}`, ["Destination", "Policy", "Routes", "Endpoints"],
    destinations.items.map((one) => [one.service, one.policy || "defaults", one.rejected_routes ? `✕ rejected: ${one.rejected_routes}` : list(one.routes), endpoints(one)])));
  return [title, ...errors, facts, ...workers];
}

function endpoints({ endpoints: { items, omitted }, circuit_open_ms: circuit }) {
  const ejected = items.filter((one) => one.ejected).map((one) => `✕ ${one.address} ${one.pod} ejected (${one.ejected})`);
  const count = `${items.length + omitted} endpoints`;
  const text = [...(circuit === null ? [] : ["✕ circuit open"]), ...ejected, count].join("; ");
  return html("span", { class: circuit === null && !ejected.length ? null : "bad" }, text);
}

// The cause of a failure

async function showWhy(what) {
  const dialog = byId("why");
  if (!what) return dialog.close();
  const [from, to] = what.split(" ");
  const query = to ? `from=${from}&to=${to}` : `id=${what}`;
  setText(byId("why-title"), to ? `Latest failure: ${from} to ${to}` : `Exchange ${what}`);
  setText(byId("why-page"), "Asking the proxies");
  if (!dialog.open) dialog.showModal();
  const page = await ask(`/api/why?${encodeURI(query)}`).then((story) => story.page, (error) => error.message);
  if (place().get("why") === what) setText(byId("why-page"), page);
}

// The page

async function ask(path) {
  const headers = { Authorization: `Bearer ${place().get("token") ?? ""}` };
  const response = await fetch(path, { headers }).catch(() => {
    throw new Error("The server of this page does not respond. Is `mesh dashboard` still running?");
  });
  if (response.ok) return response.json();
  throw new Error((await response.text()).trim());
}

async function poll() {
  if (!document.hidden) {
    try {
      traffic = await ask("/api/traffic");
      [receivedAt, failure] = [Date.now(), traffic.error ?? ""];
    } catch (error) {
      failure = error.message;
    }
    render();
  }
  setTimeout(poll, INTERVAL_MS);
}

function matching(all, text) {
  const has = (name) => name.toLowerCase().includes(text);
  const hasEnd = ({ from, to }) => has(from) || has(to);
  const leads = Object.entries(all.services).flatMap(([from, workloads]) => workloads.map((to) => ({ from, to })));
  return { edges: all.edges.filter(hasEnd), tcp: all.tcp.filter(hasEnd), leads: leads.filter(hasEnd), workloads: all.workloads.filter(({ name }) => has(name)), routes: all.routes.filter(({ name }) => has(name)) };
}

function render() {
  const notes = [...(failure ? [failure] : []), ...(traffic?.notes ?? [])];
  const age = traffic === null ? 0 : traffic.age_ms + Date.now() - receivedAt;
  byId("stale").hidden = age < STALE_MS;
  setText(byId("stale"), `This data is ${Math.round(age / 1000)} s old.`);
  if (traffic !== null) renderTraffic(notes);
  else setText(byId("summary"), failure ? "No data" : "Loading");
  patch(byId("notes"), [...new Set(notes)], (note) => note, (note) => html("li", {}, note), () => {});
}

function renderTraffic(notes) {
  const view = document.querySelector("[name=view]:checked") ?? document.querySelector(`[value=${traffic.workloads.length > LARGE_MESH ? "table" : "graph"}]`);
  view.checked = true;
  const isEmpty = !traffic.workloads.length && !traffic.edges.length && !traffic.tcp.length;
  const shown = matching(traffic, byId("filter").value.trim().toLowerCase());
  const total = traffic.workloads.reduce((sum, row) => sum + row.requests_per_second, 0);
  setText(byId("summary"), `${traffic.workloads.length} workloads, ${traffic.edges.length} calls, ${perSecond({ requests_per_second: total })} requests/s`);
  byId("empty").hidden = !isEmpty;
  byId("graph").hidden = isEmpty || view.value !== "graph";
  byId("table").hidden = isEmpty || view.value !== "table";
  if (!byId("table").hidden) renderTables(shown);
  if (byId("graph").hidden) return;
  const omitted = renderGraph(shown, place().get("workload"));
  if (omitted) notes.push(`The graph omits ${omitted} workloads: use the filter, or the table.`);
}

// What is open: an earlier place stays as it is.
let opened = { workload: null, why: null };
function navigate() {
  const [workload, why] = ["workload", "why"].map((name) => place().get(name));
  if (workload !== opened.workload) showWorkload(workload, true);
  if (why !== opened.why) showWhy(why);
  opened = { workload, why };
  render();
}

addEventListener("hashchange", navigate);
byId("filter").addEventListener("input", render);
document.querySelectorAll("[name=view]").forEach((one) => one.addEventListener("change", render));
byId("refresh").addEventListener("click", () => showWorkload(opened.workload, false));
byId("why").addEventListener("close", () => place().has("why") && (location.hash = link({ why: null })));
navigate();
poll();
