//! Representations that the encoder chooses.

use std::collections::HashMap;

use super::*;
use crate::hpack::encoder::hash;

#[test]
fn encoder_prefers_the_static_table() {
    let mut encoder = Encoder::new();
    let mut block = Vec::new();
    encoder.begin(&mut block);
    for (name, values) in [
        (":method", &["GET", "POST"][..]),
        (":scheme", &["http", "https"]),
        (":path", &["/", "/index.html"]),
        (
            ":status",
            &["200", "204", "206", "304", "400", "404", "500"],
        ),
        ("accept-encoding", &["gzip, deflate"]),
        ("vary", &[""]),
    ] {
        for value in values {
            encoder.field(name.as_bytes(), value.as_bytes(), false, &mut block);
        }
    }
    assert_eq!(block, hex("82838687848588898a8b8c8d8e90bb"));
}

#[test]
fn encoder_knows_the_names_of_the_static_table() {
    let mut indexes = HashMap::new();
    for ((name, _), index) in table::STATIC_TABLE.iter().zip(1_u8..) {
        indexes.entry(*name).or_insert(index);
    }
    for (name, index) in indexes {
        let mut block = Vec::new();
        Encoder::new().field(name.as_bytes(), b"418", false, &mut block);
        let expected = [index.min(15), index.saturating_sub(15)];
        let expected = &expected[..if index < 15 { 1 } else { 2 }];
        assert!(block.starts_with(expected), "{name}");
    }
}

#[test]
fn encoder_inserts_a_field_that_is_seen_twice() {
    let mut encoder = Encoder::new();
    let lengths = |name: &str, value: &[u8], is_sensitive, encoder: &mut Encoder| {
        [(); 3].map(|()| {
            let mut block = Vec::new();
            encoder.field(name.as_bytes(), value, is_sensitive, &mut block);
            (block[0], block.len())
        })
    };
    let expected = [(0x00, 12), (0x40, 12), (0xbe, 1)];
    assert_eq!(lengths("name", b"value", false, &mut encoder), expected);
    for name in ["traceparent", "x-request-id"] {
        let expected = [(0x00, 8 + name.len()); 3];
        assert_eq!(lengths(name, b"value", false, &mut encoder), expected);
    }
    let expected = [(0x10, 12); 3];
    assert_eq!(lengths("name", b"value", true, &mut encoder), expected);
    for (length, first) in [(1024 - 36, 0xbe), (1024 - 35, 0x00)] {
        let large = vec![b'v'; length];
        assert_eq!(lengths("name", &large, false, &mut encoder)[2].0, first);
    }
}

#[test]
fn unique_fields_evict_no_repeated_ones() {
    let mut encoder = Encoder::new();
    let repeated = [plain("name", "value")];
    for unique in 0..10_000 {
        let mut block = Vec::new();
        encode(&mut encoder, &repeated, &mut block);
        assert!(unique < 2 || block == [0xbe]);
        encoder.field(b"unique", unique.to_string().as_bytes(), false, &mut block);
    }
}

#[test]
fn fields_with_equal_hashes_are_distinguished() {
    let mut values = HashMap::new();
    let (first, second) = (0_u64..)
        .find_map(|value| {
            let hash = hash(hash(0, b"name"), value.to_string().as_bytes());
            values
                .insert(hash as u32, value)
                .map(|other| (other, value))
        })
        .unwrap();
    let fields = [first, second].map(|value| plain("name", value.to_string()));
    let (mut encoder, mut decoder) = (Encoder::new(), Decoder::new(4096));
    for _ in 0..4 {
        let mut block = Vec::new();
        encode(&mut encoder, &fields, &mut block);
        let expected = fields.each_ref().map(Plain::text).join(" | ");
        assert_eq!(decode(&mut decoder, &block).unwrap(), expected);
    }
    assert_eq!(count(&table(&mut decoder)), 2);
}

#[test]
fn encoder_writes_the_size_updates_that_the_peer_requires() {
    // The settings before a block, and the block
    let cases: [(&[usize], &str); 8] = [
        (&[], ""),
        (&[4096], ""),
        (&[65536], ""),
        (&[100], "3f45"),
        (&[50, 100], "3f133f45"),
        (&[50, 4096], "3f133fe11f"),
        (&[4096, 100], "3f45"),
        (&[0, 100, 50], "203f13"),
    ];
    for (sizes, expected) in cases {
        let mut encoder = Encoder::new();
        for size in sizes {
            encoder.set_max_table_size(*size);
        }
        let mut block = Vec::new();
        encoder.begin(&mut block);
        assert_eq!(block, hex(expected), "{sizes:?}");
        encoder.begin(&mut block);
        assert_eq!(block, hex(expected), "{sizes:?}");
    }
}
