//! The paths that servers may read from the path of a request. Each server decodes and normalises
//! it in its own way. The readings are the results of all combinations of the steps that servers
//! take.

use std::borrow::Cow;

use super::hash::hash;

/// The length of a path that is read. Most servers reject longer ones.
pub(super) const MAX_PATH_BYTES: usize = 8 * 1024;
/// The readings of one path, and the length of all of them.
const MAX_READINGS: usize = 64;
const MAX_READINGS_BYTES: usize = 64 * 1024;
/// The elements of a template.
pub(super) const MAX_ELEMENTS: usize = 32;

/// A step, which returns the new path, or `None` without a change.
type Step = fn(&[u8]) -> Option<Vec<u8>>;

/// The steps in their order. A server takes at most one of each row. Each step belongs to a reader
/// that `proto/tests/readers` runs, or to the rules that Tomcat, nginx and PHP document. A server
/// may take the path of a URL before or after it normalises the path.
const STEPS: [&[Step]; 15] = [
    &[replace_backslashes],
    AUTHORITY,
    PARAMETERS,
    &[
        remove_dot_segments,
        remove_encoded_dot_segments,
        remove_inner_dot_segments,
        remove_dot_segments_before_parameters,
    ],
    &[merge_slashes],
    &[remove_dot_segments, remove_inner_dot_segments],
    AUTHORITY,
    &[decode, decode_elements],
    &[replace_backslashes],
    AUTHORITY,
    PARAMETERS,
    &[remove_dot_segments],
    &[merge_slashes],
    &[remove_dot_segments],
    AUTHORITY,
];
const AUTHORITY: &[Step] = &[remove_authority, remove_url_authority, merge_first_slashes];
const PARAMETERS: &[Step] = &[remove_parameters, cut_parameters, remove_last_parameters];

/// A set of elements that matches every other one.
pub(super) const ANY_ELEMENT: u64 = u64::MAX;

/// The readings of a path.
#[derive(Debug)]
pub(super) struct Readings<'a> {
    /// The path itself, and its other readings. A plain path has only itself. `None`: servers may read
    /// anything.
    known: Option<(Reading<'a>, Vec<Reading<'a>>)>,
    /// The first elements of all readings.
    elements: u64,
}

/// A path that begins with a slash, as a server reads it.
#[derive(Debug)]
pub(super) struct Reading<'a> {
    pub(super) path: Cow<'a, [u8]>,
    /// The ends of the first elements.
    ends: [u16; MAX_ELEMENTS + 1],
    /// The number of elements, or `MAX_ELEMENTS + 2` if there are more than fit in `ends`.
    count: usize,
}

impl<'a> Readings<'a> {
    /// The readings of a path. With `is_plain_only`, the readings of a path that is not plain are not
    /// known.
    pub(super) fn of(path: &'a [u8], is_plain_only: bool) -> Self {
        let others = other_readings(path, is_plain_only);
        let others = others.map(|paths| paths.into_iter().map(Cow::from).map(Reading::new));
        let known = others.map(|others| (Reading::new(path.into()), others.collect()));
        let mut readings = Self {
            known,
            elements: ANY_ELEMENT,
        };
        let elements = readings.known().map(|known| known.map(Reading::elements));
        readings.elements = elements.map_or(ANY_ELEMENT, |sets| sets.fold(0, |all, one| all | one));
        readings
    }

    /// The readings, unless servers may read anything.
    pub(super) fn known(&self) -> Option<impl Iterator<Item = &Reading<'a>> + Clone> {
        let (path, others) = self.known.as_ref()?;
        Some(std::iter::once(path).chain(others))
    }

    /// Whether a reading may have one of these elements.
    pub(super) fn may_have(&self, elements: u64) -> bool {
        elements == ANY_ELEMENT || self.elements & elements != 0
    }
}

/// The set with an element at its position, whatever its ASCII case.
pub(super) fn element_set(position: usize, element: &[u8]) -> u64 {
    let bytes = element.iter().map(u8::to_ascii_lowercase);
    1 << (hash(bytes.chain([position as u8])) >> 58)
}

/// The readings of a path besides the path itself, or `None` if servers may read anything. With
/// `is_plain_only`, the readings of a path that is not plain are not known.
pub fn other_readings(path: &[u8], is_plain_only: bool) -> Option<Vec<Vec<u8>>> {
    if !is_readable(path) {
        None
    } else if is_plain(path) {
        Some(vec![])
    } else if is_plain_only {
        None
    } else {
        others(path)
    }
}

/// Whether no step changes the path.
pub(super) fn is_plain(path: &[u8]) -> bool {
    let is_special = |pair: &[u8]| matches!(pair, [b'/', b'/' | b'.']);
    !path.iter().any(|byte| b"%;\\".contains(byte)) && !path.windows(2).any(is_special)
}

/// Whether the path is plain and readable, decided by its bytes alone. Most paths are of this kind.
pub(super) fn is_common(path: &[u8]) -> bool {
    let is_unreserved = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte);
    let mut before = 0;
    path.len() <= MAX_PATH_BYTES
        && path.first() == Some(&b'/')
        && path.iter().all(|&byte| {
            let follows_slash = std::mem::replace(&mut before, byte) == b'/';
            match byte {
                b'/' | b'.' => !follows_slash,
                _ => is_unreserved(byte),
            }
        })
}

/// Whether servers agree on the characters of the path: it begins with a slash, is encoded as RFC
/// 3986 has it, and is UTF-8 without control characters when it is decoded. A query or a fragment
/// is not part of it.
pub(super) fn is_readable(path: &[u8]) -> bool {
    let is_text = |text: &[u8]| {
        !text.iter().any(u8::is_ascii_control) && (text.is_ascii() || str::from_utf8(text).is_ok())
    };
    path.len() <= MAX_PATH_BYTES
        && path.first() == Some(&b'/')
        && !path.iter().any(|byte| b"?#".contains(byte))
        && is_text(path)
        && (!path.contains(&b'%') || is_encoded(path) && is_text(&decoded(path, false)))
}

/// The decoded path of a pattern, for servers that decode both patterns and paths. An encoded slash
/// stays. `None` if the decoded path is the same.
pub fn decoded_pattern(path: &[u8]) -> Option<Vec<u8>> {
    let decoded = decode_elements(path).filter(|_| is_encoded(path))?;
    (decoded != path).then_some(decoded)
}

/// Whether all servers divide the path into the same elements. They may decode the elements, and cut
/// parameters.
pub fn has_certain_elements(path: &[u8]) -> bool {
    let decoded = decoded(path, false);
    let slashes = |path: &[u8]| path.iter().filter(|byte| **byte == b'/').count();
    if !is_readable(path) || decoded.contains(&b'\\') || slashes(&decoded) > slashes(path) {
        return false;
    }
    // A slash at the end makes no further element.
    let elements = decoded.strip_suffix(b"/").unwrap_or(&decoded);
    let mut elements = elements.split(|byte| *byte == b'/').skip(1);
    elements.all(|element| {
        let name = element.split(|byte| *byte == b';').next();
        !matches!(name, None | Some(b"" | b"." | b".."))
    })
}

/// Whether each percent sign begins an encoded byte.
pub(super) fn is_encoded(path: &[u8]) -> bool {
    let mut parts = path.split(|byte| *byte == b'%').skip(1);
    parts.all(|part| part.len() >= 2 && part[..2].iter().all(u8::is_ascii_hexdigit))
}

/// The readings other than the path itself, or `None` if there are too many.
fn others(path: &[u8]) -> Option<Vec<Vec<u8>>> {
    let mut readings = vec![path.to_vec()];
    let mut bytes = path.len();
    for steps in STEPS {
        for position in 0..readings.len() {
            for step in steps {
                let reading = step(&readings[position]);
                let Some(reading) = reading.filter(|reading| !readings.contains(reading)) else {
                    continue;
                };
                bytes += reading.len();
                readings.push(reading);
                if readings.len() > MAX_READINGS || bytes > MAX_READINGS_BYTES {
                    return None;
                }
            }
        }
    }
    readings.swap_remove(0);
    Some(readings)
}

fn replace_backslashes(path: &[u8]) -> Option<Vec<u8>> {
    let replace = |byte: &u8| if *byte == b'\\' { b'/' } else { *byte };
    path.contains(&b'\\')
        .then(|| path.iter().map(replace).collect())
}

/// The path of a reference without scheme (RFC 3986, section 4.2): "//host/path".
fn remove_authority(path: &[u8]) -> Option<Vec<u8>> {
    let rest = path.strip_prefix(b"//")?;
    let slash = rest.iter().position(|byte| *byte == b'/');
    Some(slash.map_or(b"/".to_vec(), |slash| rest[slash..].to_vec()))
}

/// The path as the URL Standard reads it (Node.js, Deno, Bun, Rust's `url`): any number of slashes
/// precedes the host.
fn remove_url_authority(path: &[u8]) -> Option<Vec<u8>> {
    let host = path.iter().position(|byte| *byte != b'/')?;
    remove_authority(&path[host.checked_sub(2)?..])
}

/// The path as Python's `http.server` reads it.
fn merge_first_slashes(path: &[u8]) -> Option<Vec<u8>> {
    let first = path.iter().position(|byte| *byte != b'/');
    let start = first.unwrap_or(path.len()).checked_sub(1)?;
    (start > 0).then(|| path[start..].to_vec())
}

/// Without ";..." in each element.
fn remove_parameters(path: &[u8]) -> Option<Vec<u8>> {
    let mut is_parameter = false;
    let is_kept = |byte: &u8| {
        is_parameter = *byte == b';' || is_parameter && *byte != b'/';
        !is_parameter
    };
    path.contains(&b';')
        .then(|| path.iter().copied().filter(is_kept).collect())
}

/// Without all that follows the first semicolon.
fn cut_parameters(path: &[u8]) -> Option<Vec<u8>> {
    let semicolon = path.iter().position(|byte| *byte == b';')?;
    Some(path[..semicolon].to_vec())
}

/// Without ";..." in the last element, as Python's `urlparse` has it.
fn remove_last_parameters(path: &[u8]) -> Option<Vec<u8>> {
    Some(path[..last_parameters(path)?].to_vec())
}

/// The start of the parameters of the last element.
fn last_parameters(path: &[u8]) -> Option<usize> {
    let last = path.iter().rposition(|byte| *byte == b'/')?;
    let semicolon = path[last..].iter().position(|byte| *byte == b';')?;
    Some(last + semicolon)
}

fn merge_slashes(path: &[u8]) -> Option<Vec<u8>> {
    let mut merged = path.to_vec();
    merged.dedup_by(|byte, previous| *byte == b'/' && *previous == b'/');
    (merged.len() < path.len()).then_some(merged)
}

/// RFC 3986, section 5.2.4.
fn remove_dot_segments(path: &[u8]) -> Option<Vec<u8>> {
    remove_dots(path, dots, false)
}

/// As `normalize` of Java's `URI` has it: ".." stays where nothing precedes it.
fn remove_inner_dot_segments(path: &[u8]) -> Option<Vec<u8>> {
    remove_dots(path, dots, true)
}

/// As Python's `urljoin` has it: the parameters of the last element stay.
fn remove_dot_segments_before_parameters(path: &[u8]) -> Option<Vec<u8>> {
    let (path, parameters) = path.split_at(last_parameters(path)?);
    Some([&remove_dot_segments(path)?, parameters].concat())
}

/// The number of dots of a segment without other characters: 1, 2, or 0 if it is another one.
fn dots(segment: &[u8]) -> usize {
    match segment {
        b"." => 1,
        b".." => 2,
        _ => 0,
    }
}

/// As the URL Standard has it: encoded dots are dots.
fn remove_encoded_dot_segments(path: &[u8]) -> Option<Vec<u8>> {
    let is_encoded = |dot: &&[u8]| dot.eq_ignore_ascii_case(b"%2e");
    let dots = |segment: &[u8]| {
        let (mut dots, mut rest) = (0, segment);
        while let Some(length) = rest.first().map(|byte| if *byte == b'.' { 1 } else { 3 }) {
            let dot = rest
                .get(..length)
                .filter(|dot| length == 1 || is_encoded(dot));
            if dot.is_none() || dots == 2 {
                return 0;
            }
            dots += 1;
            rest = &rest[length..];
        }
        dots
    };
    remove_dots(path, dots, false)
}

/// Without the segments that have one dot or two, by their number of dots. With `keeps_first`, two
/// stay where nothing precedes them.
fn remove_dots(path: &[u8], dots: impl Fn(&[u8]) -> usize, keeps_first: bool) -> Option<Vec<u8>> {
    let mut output = Vec::with_capacity(path.len());
    let mut last = 0;
    for segment in path[1..].split(|byte| *byte == b'/') {
        last = dots(segment);
        let is_first = output.is_empty() || output.ends_with(b"/..");
        if last == 2 && !(keeps_first && is_first) {
            let slash = output.iter().rposition(|byte| *byte == b'/');
            output.truncate(slash.unwrap_or(0));
        } else if last != 1 {
            output.push(b'/');
            output.extend_from_slice(segment);
        }
    }
    if last > 0 {
        output.push(b'/');
    }
    (output != path).then_some(output)
}

fn decode(path: &[u8]) -> Option<Vec<u8>> {
    path.contains(&b'%').then(|| decoded(path, false))
}

/// As servers do that divide the path into elements first: an encoded slash does not separate them.
fn decode_elements(path: &[u8]) -> Option<Vec<u8>> {
    path.contains(&b'%').then(|| decoded(path, true))
}

fn decoded(path: &[u8], keeps_slashes: bool) -> Vec<u8> {
    let digit = |digit: u8| char::from(digit).to_digit(16).unwrap_or(0) as u8;
    let mut output = Vec::with_capacity(path.len());
    let mut rest = path;
    while let [byte, tail @ ..] = rest {
        rest = tail;
        match tail {
            [high, low, tail @ ..] if *byte == b'%' => {
                let byte = digit(*high) << 4 | digit(*low);
                if keeps_slashes && byte == b'/' {
                    output.push(b'%');
                } else {
                    output.push(byte);
                    rest = tail;
                }
            }
            _ => output.push(*byte),
        }
    }
    output
}

impl<'a> Reading<'a> {
    fn new(path: Cow<'a, [u8]>) -> Self {
        let mut ends = [0; MAX_ELEMENTS + 1];
        let mut count = 0;
        let slashes = (1..path.len()).filter(|position| path[*position] == b'/');
        for end in slashes.chain([path.len()]).take(ends.len() + 1) {
            if let Some(place) = ends.get_mut(count) {
                *place = end as u16;
            }
            count += 1;
        }
        Self { path, ends, count }
    }

    /// The number of elements: of "/a/", two, or one without the slash at its end. All numbers above
    /// `MAX_ELEMENTS` + 1 are `MAX_ELEMENTS` + 2.
    pub(super) fn count(&self, is_trimmed: bool) -> usize {
        let mut count = self.count;
        while is_trimmed
            && (1..=self.ends.len()).contains(&count)
            && self.element(count - 1).is_empty()
        {
            count -= 1;
        }
        count
    }

    /// One of the first `MAX_ELEMENTS` + 1 elements.
    pub(super) fn element(&self, position: usize) -> &[u8] {
        let start = position
            .checked_sub(1)
            .map_or(0, |before| self.ends[before]);
        &self.path[usize::from(start) + 1..usize::from(self.ends[position])]
    }

    fn elements(&self) -> u64 {
        let positions = 0..self.count.min(self.ends.len());
        let sets = positions.map(|position| element_set(position, self.element(position)));
        sets.fold(0, |all, one| all | one)
    }
}
