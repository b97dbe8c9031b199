//! The frames that an HTTP/2 connection receives, below `h2`. It removes empty DATA frames, which change
//! nothing: `h2` accepts 100 of them on a connection, and some servers send one for each response. It
//! also counts SETTINGS frames, and keeps header blocks until they are complete: `h2` holds what it has
//! decoded of one, which is larger, and is not charged. It reads the heads of frames only, and leaves
//! every other judgement to `h2`.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use bytes::BytesMut;

/// The length of a client's preface (RFC 9113, section 3.4).
pub const PREFACE_LENGTH: usize = 24;

/// The maximum number of empty DATA frames that are removed in [`REMOVAL_INTERVAL`]. `h2` gets further
/// ones, and closes the connection.
const MAX_REMOVED: u32 = 10_000;
const REMOVAL_INTERVAL: Duration = Duration::from_secs(1);
/// The maximum size of a header block, with the heads of its frames. A field of it has at most 8/5
/// of that (RFC 7541, appendix B), 448 KiB. `h2` silently drops trailers beyond its limit for the
/// list of fields, [`MAX_HEADER_LIST`]. The rest is over the proxy's own limit then.
///
/// [`MAX_HEADER_LIST`]: super::connect::http2::MAX_HEADER_LIST
const MAX_HEADER_BLOCK: usize = 280 * 1024;
/// The maximum number of streams whose peer has not got back the window that its padding has used.
const MAX_PADDED_STREAMS: usize = 1_000;

const HEAD_LENGTH: usize = 9;
const DATA: u8 = 0;
const HEADERS: u8 = 1;
const SETTINGS: u8 = 4;
const WINDOW_UPDATE: u8 = 8;
const CONTINUATION: u8 = 9;
const END_STREAM: u8 = 1;
const ACK: u8 = 1;
const END_HEADERS: u8 = 4;
const PADDED: u8 = 8;

/// The position in the bytes of a connection.
pub struct Frames {
    /// The number of bytes until the next head.
    passing: usize,
    /// The number of bytes of padding that follow, and are removed.
    removing: usize,
    /// The number of SETTINGS frames, without acknowledgments.
    settings: u64,
    /// A header block continues in the next frame.
    in_header_block: bool,
    /// The size of the header block so far.
    header_block: usize,
    /// The number of bytes of an incomplete header block that were read already.
    waiting: usize,
    /// The frames that were removed since `since`.
    removed: u32,
    since: Instant,
    /// The flow-control window that removed padding has used, by stream.
    used: BTreeMap<u32, u32>,
}

impl Frames {
    /// The frames after this number of other bytes.
    pub fn after(preface: usize) -> Self {
        Self {
            passing: preface,
            removing: 0,
            settings: 0,
            in_header_block: false,
            header_block: 0,
            waiting: 0,
            removed: 0,
            since: Instant::now(),
            used: BTreeMap::new(),
        }
    }

    /// Removes the empty DATA frames. Returns the number of bytes before what is incomplete, which stays:
    /// a head, or a header block of several frames.
    pub fn filter(&mut self, bytes: &mut BytesMut) -> usize {
        let (mut read, mut kept) = (self.waiting, self.waiting);
        let mut block = self.in_header_block.then_some(0);
        loop {
            let rest = bytes.len() - read;
            if self.removing > 0 {
                let removed = rest.min(self.removing);
                read += removed;
                self.removing -= removed;
            } else if self.passing > 0 {
                let passed = rest.min(self.passing);
                if read != kept {
                    bytes.copy_within(read..read + passed, kept);
                }
                read += passed;
                kept += passed;
                self.passing -= passed;
            } else if !self.next(&bytes[read..]) {
                break;
            } else if !self.in_header_block {
                block = None;
            } else if block.is_none() {
                block = Some(kept);
            }
            if read == bytes.len() {
                break;
            }
        }
        if read != kept {
            let end = kept + bytes.len() - read;
            bytes.copy_within(read.., kept);
            bytes.truncate(end);
        }
        let complete = block.unwrap_or(kept);
        self.waiting = kept - complete;
        complete
    }

    /// The number of SETTINGS frames of the peer so far.
    pub fn settings(&self) -> u64 {
        self.settings
    }

    /// Whether a header block is over the limit. No further frame passes.
    pub fn is_over_limit(&self) -> bool {
        self.header_block > MAX_HEADER_BLOCK
    }

    /// Reads the head of the next frame. Returns false if it is incomplete, or over a limit.
    fn next(&mut self, bytes: &[u8]) -> bool {
        let Some(&[a, b, c, kind, flags, s, t, u, v]) = bytes.first_chunk::<HEAD_LENGTH>() else {
            return false;
        };
        let length = u32::from_be_bytes([0, a, b, c]);
        let stream = u32::from_be_bytes([s, t, u, v]) & (u32::MAX >> 1);
        let is_data = kind == DATA && flags & END_STREAM == 0;
        let is_padded = flags & PADDED != 0 && length > 0;
        if is_data && is_padded && bytes.len() == HEAD_LENGTH {
            return false;
        }
        let is_empty = match bytes.get(HEAD_LENGTH) {
            Some(padding) if is_padded => u32::from(*padding) + 1 == length,
            _ => length == 0,
        };
        let size = HEAD_LENGTH + length as usize;
        if is_data && is_empty && !self.in_header_block && self.may_remove(stream, length) {
            self.removing = size;
            return true;
        }
        match kind {
            HEADERS | CONTINUATION => {
                let before = if kind == HEADERS {
                    0
                } else {
                    self.header_block
                };
                self.header_block = before + size;
                if self.is_over_limit() {
                    return false;
                }
                self.in_header_block = flags & END_HEADERS == 0;
            }
            SETTINGS if flags & ACK == 0 => self.settings += 1,
            _ => {}
        }
        self.passing = size;
        true
    }

    /// Whether the empty frame is removed. Then its padding counts as used.
    fn may_remove(&mut self, stream: u32, length: u32) -> bool {
        if self.removed == MAX_REMOVED && self.since.elapsed() >= REMOVAL_INTERVAL {
            (self.removed, self.since) = (0, Instant::now());
        }
        let is_accounted = length == 0 || self.used.len() < MAX_PADDED_STREAMS;
        if self.removed == MAX_REMOVED || !is_accounted || stream == 0 {
            return false;
        }
        self.removed += 1;
        if length > 0 {
            *self.used.entry(stream).or_default() += length;
        }
        true
    }

    /// Appends WINDOW_UPDATE frames for the padding that was removed.
    pub fn return_windows(&mut self, output: &mut Vec<u8>) {
        let used = std::mem::take(&mut self.used);
        let all: u32 = used.values().sum();
        for (stream, size) in used.into_iter().chain((all > 0).then_some((0, all))) {
            output.extend([0, 0, 4, WINDOW_UPDATE, 0]);
            output.extend(stream.to_be_bytes());
            output.extend(size.to_be_bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(kind: u8, flags: u8, stream: u8, payload: &[u8]) -> Vec<u8> {
        let head = [0, 0, payload.len() as u8, kind, flags, 0, 0, 0, stream];
        [&head, payload].concat()
    }

    /// Passes `input` in pieces of this size.
    fn filtered(frames: &mut Frames, input: &[u8], size: usize) -> Vec<u8> {
        let (mut output, mut unread) = (Vec::new(), BytesMut::new());
        for piece in input.chunks(size) {
            unread.extend_from_slice(piece);
            let complete = frames.filter(&mut unread);
            output.extend(unread.split_to(complete));
        }
        assert!(unread.is_empty());
        output
    }

    #[test]
    fn removes_empty_data_frames_only_wherever_reads_end() {
        let empty = frame(DATA, 0, 1, b"");
        let padded = frame(DATA, PADDED, 3, &[4, 0, 0, 0, 0]);
        let kept = [
            frame(SETTINGS, 0, 0, b"settings"),
            frame(SETTINGS, ACK, 0, b""),
            frame(HEADERS, END_HEADERS, 1, b"block"),
            frame(DATA, 0, 1, b"data"),
            frame(DATA, PADDED, 1, b"\x02data\0\0"),
            frame(DATA, END_STREAM, 1, b""),
            frame(DATA, END_STREAM | PADDED, 1, &[1, 0]),
            // Padding that is longer than the frame.
            frame(DATA, PADDED, 1, &[9, 0]),
            frame(DATA, 0, 0, b""),
        ];
        let mut input = b"the preface of a client!".to_vec();
        let mut expected = input.clone();
        for frame in &kept {
            input.extend([&empty[..], &padded, frame, &empty].concat());
            expected.extend(frame);
        }
        // Within a header block, a DATA frame is an error.
        let block = [frame(HEADERS, 0, 5, b"a"), empty.clone()].concat();
        let end = [frame(CONTINUATION, END_HEADERS, 5, b"b"), empty].concat();
        expected.extend([&block[..], &frame(CONTINUATION, END_HEADERS, 5, b"b")].concat());
        input.extend([block, end].concat());
        for size in 1..input.len() {
            let mut frames = Frames::after(PREFACE_LENGTH);
            assert_eq!(filtered(&mut frames, &input, size), expected, "{size}");
            let mut windows = Vec::new();
            frames.return_windows(&mut windows);
            assert_eq!(frames.settings(), 1);
            let size = 5 * kept.len() as u8;
            let update = |stream| frame(WINDOW_UPDATE, 0, stream, &[0, 0, 0, size]);
            assert_eq!(windows, [update(3), update(0)].concat());
            frames.return_windows(&mut windows);
            assert_eq!(windows.len(), 26);
        }
    }

    #[test]
    fn header_block_passes_once_it_is_complete_within_the_limit() {
        let data = frame(DATA, 0, 1, b"data");
        let first = frame(HEADERS, 0, 3, &[0; 91]);
        let next = frame(CONTINUATION, 0, 3, &[0; 91]);
        let last = frame(CONTINUATION, END_HEADERS, 3, &[0; 91]);
        let most = MAX_HEADER_BLOCK / 100 - 2;
        let input = [&data[..], &first, &next.repeat(most), &last, &data].concat();
        for size in [1, 99, 100, 101, 5_000, input.len()] {
            let mut frames = Frames::after(0);
            let (mut passed, mut unread) = (Vec::new(), BytesMut::new());
            for piece in input.chunks(size) {
                unread.extend_from_slice(piece);
                let complete = frames.filter(&mut unread);
                passed.extend(unread.split_to(complete));
                let block = data.len()..input.len() - data.len() - 91;
                assert!(!block.contains(&passed.len()) || passed == data, "{size}");
            }
            assert!(passed == input && !frames.is_over_limit(), "{size}");
        }
        let mut input = BytesMut::from(&[&data[..], &first, &next.repeat(most + 2)].concat()[..]);
        let mut frames = Frames::after(0);
        assert_eq!(frames.filter(&mut input), data.len());
        assert!(frames.is_over_limit());
    }

    #[test]
    fn passes_on_a_flood_of_empty_frames() {
        let mut frames = Frames::after(0);
        let flood = frame(DATA, 0, 1, b"").repeat(MAX_REMOVED as usize + 7);
        assert_eq!(filtered(&mut frames, &flood, 4096).len(), 7 * HEAD_LENGTH);
        frames.since -= REMOVAL_INTERVAL;
        assert_eq!(filtered(&mut frames, &flood, 4096).len(), 7 * HEAD_LENGTH);
        // The windows of a peer that reads nothing.
        let mut frames = Frames::after(0);
        let padded = |stream: u32| {
            let mut frame = frame(DATA, PADDED, 0, &[0]);
            frame[5..9].copy_from_slice(&stream.to_be_bytes());
            frame
        };
        let flood: Vec<u8> = (1..=1_003).flat_map(padded).collect();
        assert_eq!(filtered(&mut frames, &flood, 4096).len(), 3 * 10);
    }
}
