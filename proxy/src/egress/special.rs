//! Addresses to which no name leads. Data: the registries of special-purpose addresses of IANA but for
//! private networks (RFC 1918, RFC 4193, RFC 6598), and metadata services of clouds.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// A block of addresses, of IPv4 as mapped ones of IPv6.
struct Block {
    bits: u128,
    length: u32,
}

const fn v4(a: u8, b: u8, c: u8, d: u8, length: u32) -> Block {
    let address = Ipv4Addr::new(a, b, c, d).to_ipv6_mapped();
    Block {
        bits: address.to_bits(),
        length: 96 + length,
    }
}

const fn v6(start: [u16; 4], end: [u16; 4], length: u32) -> Block {
    let ([a, b, c, d], [e, f, g, h]) = (start, end);
    Block {
        bits: Ipv6Addr::new(a, b, c, d, e, f, g, h).to_bits(),
        length,
    }
}

const BLOCKS: [Block; 32] = [
    // https://www.iana.org/assignments/iana-ipv4-special-registry
    v4(0, 0, 0, 0, 8),
    v4(127, 0, 0, 0, 8),
    v4(169, 254, 0, 0, 16),
    v4(192, 0, 0, 0, 24),
    v4(192, 0, 2, 0, 24),
    v4(192, 31, 196, 0, 24),
    v4(192, 52, 193, 0, 24),
    v4(192, 88, 99, 0, 24),
    v4(192, 175, 48, 0, 24),
    v4(198, 18, 0, 0, 15),
    v4(198, 51, 100, 0, 24),
    v4(203, 0, 113, 0, 24),
    v4(240, 0, 0, 0, 4),
    // Multicast (RFC 5771).
    v4(224, 0, 0, 0, 4),
    // https://www.iana.org/assignments/iana-ipv6-special-registry. `embedded` translates those that
    // contain an address of IPv4.
    v6([0, 0, 0, 0], [0, 0, 0, 0], 128),
    v6([0, 0, 0, 0], [0, 0, 0, 1], 128),
    v6([0x100, 0, 0, 0], [0, 0, 0, 0], 64),
    v6([0x100, 0, 0, 1], [0, 0, 0, 0], 64),
    v6([0x2001, 0, 0, 0], [0, 0, 0, 0], 23),
    v6([0x2001, 0xdb8, 0, 0], [0, 0, 0, 0], 32),
    v6([0x2620, 0x4f, 0x8000, 0], [0, 0, 0, 0], 48),
    v6([0x3fff, 0, 0, 0], [0, 0, 0, 0], 20),
    v6([0x5f00, 0, 0, 0], [0, 0, 0, 0], 16),
    v6([0xfe80, 0, 0, 0], [0, 0, 0, 0], 10),
    // Addresses of IPv4 without a meaning, of a site, and multicast (RFC 4291).
    v6([0, 0, 0, 0], [0, 0, 0, 0], 96),
    v6([0xfec0, 0, 0, 0], [0, 0, 0, 0], 10),
    v6([0xff00, 0, 0, 0], [0, 0, 0, 0], 8),
    // Metadata: Azure, Alibaba Cloud, AWS, Google Cloud, Oracle Cloud. Link-local ones are above.
    v4(168, 63, 129, 16, 32),
    v4(100, 100, 100, 200, 32),
    v6([0xfd00, 0xec2, 0, 0], [0, 0, 0, 0], 32),
    v6([0xfd20, 0xce, 0, 0], [0, 0, 0, 0x254], 128),
    v6([0xfd00, 0xc1, 0, 0], [0, 0, 0xa9fe, 0xa9fe], 128),
];

/// Whether an address is in a block of the list.
pub fn is_special(address: IpAddr) -> bool {
    let bits = match address {
        IpAddr::V4(address) => address.to_ipv6_mapped().to_bits(),
        IpAddr::V6(address) => address.to_bits(),
    };
    let mut blocks = BLOCKS.iter();
    blocks.any(|block| (bits ^ block.bits) >> (128 - block.length) == 0)
}

/// The addresses of IPv4 to which an address of IPv6 may lead: mapped, by NAT64 (RFC 6052, RFC 8215)
/// and by 6to4 (RFC 3056).
pub fn embedded(address: IpAddr) -> impl Iterator<Item = IpAddr> {
    let IpAddr::V6(address) = address else {
        return [None, None].into_iter().flatten();
    };
    let at = |shift: u32| Some(Ipv4Addr::from_bits((address.to_bits() >> shift) as u32).into());
    let found = match address.segments() {
        [0, 0, 0, 0, 0, 0xffff, ..] | [0x64, 0xff9b, 0, 0, 0, 0, ..] => [at(0), None],
        // A prefix of 96 bits, and one of 48 bits with eight bits of zero in the address.
        [0x64, 0xff9b, 1, high, low, rest, ..] => {
            let [high, low, rest] = [high, low, rest].map(u32::from);
            let bits = high << 16 | (low & 0xff) << 8 | rest >> 8;
            [at(0), Some(Ipv4Addr::from_bits(bits).into())]
        }
        [0x2002, ..] => [at(80), None],
        _ => [None, None],
    };
    found.into_iter().flatten()
}
