//! The decoder of the Huffman code of RFC 7541, appendix B: a state machine that reads 4 bits per
//! step, in a time that depends only on the length of the input.

use super::DecodeError;

/// The number of symbols: the 256 byte values and EOS.
const SYMBOLS: usize = 257;
/// The symbol that no text contains.
const EOS: usize = 256;
/// The length of the longest codes in bits.
const MAX_LENGTH: u8 = 30;
/// The state after 7 bits of padding. Up to 29, state n is the state after n ones.
const MAX_PADDING: u8 = 7;

/// The lengths of the codes in bits, by symbol. The code is canonical: in the order of lengths and
/// then of symbols, codes are consecutive numbers, shifted to the left for each further bit.
#[rustfmt::skip]
pub(super) const LENGTHS: [u8; SYMBOLS] = [
    13, 23, 28, 28, 28, 28, 28, 28, 28, 24, 30, 28, 28, 30, 28, 28,
    28, 28, 28, 28, 28, 28, 30, 28, 28, 28, 28, 28, 28, 28, 28, 28,
     6, 10, 10, 12, 13,  6,  8, 11, 10, 10,  8, 11,  8,  6,  6,  6,
     5,  5,  5,  6,  6,  6,  6,  6,  6,  6,  7,  8, 15,  6, 12, 10,
    13,  6,  7,  7,  7,  7,  7,  7,  7,  7,  7,  7,  7,  7,  7,  7,
     7,  7,  7,  7,  7,  7,  7,  7,  8,  7,  8, 13, 19, 13, 14,  6,
    15,  5,  6,  5,  6,  5,  6,  6,  6,  5,  7,  7,  6,  6,  6,  5,
     6,  7,  6,  5,  5,  6,  7,  7,  7,  7,  7, 15, 11, 14, 13, 28,
    20, 22, 20, 20, 22, 22, 22, 23, 22, 23, 23, 23, 23, 23, 24, 23,
    24, 24, 22, 23, 24, 23, 23, 23, 23, 21, 22, 23, 22, 23, 23, 24,
    22, 21, 20, 22, 22, 23, 23, 21, 23, 22, 22, 24, 21, 22, 23, 23,
    21, 21, 22, 21, 23, 22, 23, 23, 20, 22, 22, 22, 23, 22, 22, 23,
    26, 26, 20, 19, 22, 23, 22, 25, 26, 26, 26, 27, 27, 26, 24, 25,
    19, 21, 26, 27, 27, 26, 27, 24, 21, 21, 26, 26, 28, 27, 27, 27,
    20, 24, 20, 21, 22, 21, 21, 23, 22, 22, 25, 25, 24, 24, 26, 23,
    26, 27, 26, 26, 27, 27, 27, 27, 27, 28, 27, 27, 27, 27, 27, 26,
    30,
];

/// The children of the inner nodes of the code tree. The root, which is no child, is node 0.
type Tree = [[u16; 2]; 256];
/// The first child that is a leaf: the leaf of symbol 0.
const LEAF: u16 = 256;
const EOS_LEAF: u16 = LEAF + EOS as u16;

/// A transition of the state machine. The states are the inner nodes of the code tree.
#[derive(Clone, Copy)]
#[repr(align(4))]
struct Step {
    next: u8,
    symbol: u8,
    /// Whether the step completes `symbol`. The shortest code has 5 bits: no step completes two.
    is_complete: bool,
    /// Whether the step completes EOS.
    is_eos: bool,
}

/// The transitions by state and input.
static STEPS: [[Step; 16]; 256] = steps(&tree());

/// Decodes a text. The result is a part of `scratch`, which grows as required.
pub(super) fn decode<'a>(text: &[u8], scratch: &'a mut Vec<u8>) -> Result<&'a [u8], DecodeError> {
    // Each symbol has 5 bits or more. One further byte is for the symbol of an incomplete step.
    let max_length = text.len() * 8 / 5 + 1;
    if scratch.len() < max_length {
        scratch.resize(max_length, 0);
    }
    let (mut state, mut length, mut has_eos) = (0, 0, false);
    for byte in text {
        for input in [byte >> 4, byte & 0xf] {
            let step = STEPS[usize::from(state)][usize::from(input)];
            // Without branches, which are mispredicted here: an incomplete symbol is overwritten.
            scratch[length] = step.symbol;
            length += usize::from(step.is_complete);
            has_eos |= step.is_eos;
            state = step.next;
        }
    }
    if has_eos {
        return Err(DecodeError("EOS in a Huffman-coded string"));
    }
    if state > MAX_PADDING {
        return Err(DecodeError("invalid padding of a Huffman-coded string"));
    }
    Ok(&scratch[..length])
}

const fn steps(tree: &Tree) -> [[Step; 16]; 256] {
    let start = Step {
        next: 0,
        symbol: 0,
        is_complete: false,
        is_eos: false,
    };
    let mut steps = [[start; 16]; 256];
    let mut state = 0;
    while state < 256 {
        let mut input = 0;
        while input < 16 {
            let step = &mut steps[state][input];
            step.next = state as u8;
            let mut bit = 4;
            while bit > 0 {
                bit -= 1;
                let child = tree[step.next as usize][input >> bit & 1];
                if child < LEAF {
                    step.next = child as u8;
                } else if child == EOS_LEAF {
                    step.next = 0;
                    step.is_eos = true;
                } else {
                    step.next = 0;
                    step.symbol = (child - LEAF) as u8;
                    step.is_complete = true;
                }
            }
            input += 1;
        }
        state += 1;
    }
    steps
}

const fn tree() -> Tree {
    let mut tree = [[0; 2]; 256];
    let mut nodes = 1;
    // The code of EOS, 30 ones, comes first. The state after n ones thus is n.
    while nodes < MAX_LENGTH as u16 {
        tree[nodes as usize - 1][1] = nodes;
        nodes += 1;
    }
    let (mut code, mut length) = (0_u32, 1);
    while length <= MAX_LENGTH {
        let mut symbol = 0;
        while symbol < SYMBOLS {
            if LENGTHS[symbol] == length {
                let (mut node, mut bit) = (0, length - 1);
                while bit > 0 {
                    let child = &mut tree[node][(code >> bit & 1) as usize];
                    if *child == 0 {
                        *child = nodes;
                        nodes += 1;
                    }
                    node = *child as usize;
                    bit -= 1;
                }
                tree[node][(code & 1) as usize] = LEAF + symbol as u16;
                code += 1;
            }
            symbol += 1;
        }
        code <<= 1;
        length += 1;
    }
    tree
}
