// What Node.js reads from paths: a path per line in, its readings per line out, separated by tabs.
const path = require('node:path').posix;
const url = require('node:url');

// A reading, none where the reader rejects the path, and its decoded form. No path is decoded twice.
function read(name, reader, isDecoded = false) {
  try {
    const raw = reader();
    if (isDecoded) {
      return [[name, raw]];
    }
    try {
      return [[name, raw], [name + '-decoded', decodeURIComponent(raw)]];
    } catch {
      return [[name, raw]];
    }
  } catch {
    return [];
  }
}

const lines = require('node:fs').readFileSync(0, 'utf8').trimEnd().split('\n');
for (const line of lines) {
  const readings = [
    ...read('node-URL', () => new URL(line, 'http://localhost').pathname),
    ...read('node-url.parse', () => url.parse(line).pathname),
    ...read('node-normalize', () => path.normalize(line)),
    ...read('node-decode-normalize', () => path.normalize(decodeURIComponent(line)), true),
    ...read('node-decode-URL', () => new URL(decodeURIComponent(line), 'http://localhost').pathname, true),
    ...read(
      'node-URL-normalize',
      () => path.normalize(decodeURIComponent(new URL(line, 'http://localhost').pathname)),
      true,
    ),
  ];
  console.log(readings.map(([name, reading]) => `${name}=${reading}`).join('\t'));
}
