//! Representations that the encoder chooses.

use std::collections::HashMap;

use super::*;
use crate::hpack::encoder::hash;

#[test]
fn encoder_prefers_the_static_table() {
    let mut encoder = Encoder::new();
    let mut block = Vec::new();
    encoder.begin(&mut block);
    encoder.method(&Method::GET, &mut block);
    encoder.method(&Method::POST, &mut block);
    encoder.scheme(&Scheme::HTTP, &mut block);
    encoder.scheme(&Scheme::HTTPS, &mut block);
    encoder.path("/", &mut block);
    encoder.path("/index.html", &mut block);
    for status in [200, 204, 206, 304, 400, 404, 500] {
        encoder.status(StatusCode::from_u16(status).unwrap(), &mut block);
    }
    for (name, value) in [("accept-encoding", "gzip, deflate"), ("vary", "")] {
        let value = HeaderValue::from_static(value);
        encoder.header(&HeaderName::from_static(name), &value, &mut block);
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
        let value = HeaderValue::from_static("418");
        let mut block = Vec::new();
        match name {
            ":method" => Encoder::new().method(&Method::PUT, &mut block),
            ":scheme" => Encoder::new().scheme(&"coap".parse().unwrap(), &mut block),
            ":authority" => Encoder::new().authority("host", &mut block),
            ":path" => Encoder::new().path("/path", &mut block),
            ":status" => Encoder::new().status(StatusCode::IM_A_TEAPOT, &mut block),
            name => Encoder::new().header(&HeaderName::from_static(name), &value, &mut block),
        }
        let expected = [index.min(15), index.saturating_sub(15)];
        let expected = &expected[..if index < 15 { 1 } else { 2 }];
        assert!(block.starts_with(expected), "{name}");
    }
}

#[test]
fn encoder_inserts_a_field_that_is_seen_twice() {
    let mut encoder = Encoder::new();
    let value = HeaderValue::from_static("value");
    let lengths = |name: &'static str, value: &HeaderValue, encoder: &mut Encoder| {
        [(); 3].map(|()| {
            let mut block = Vec::new();
            encoder.header(&HeaderName::from_static(name), value, &mut block);
            (block[0], block.len())
        })
    };
    let expected = [(0x00, 12), (0x40, 12), (0xbe, 1)];
    assert_eq!(lengths("name", &value, &mut encoder), expected);
    for name in ["traceparent", "x-request-id"] {
        let expected = [(0x00, 8 + name.len()); 3];
        assert_eq!(lengths(name, &value, &mut encoder), expected);
    }
    let mut sensitive = value.clone();
    sensitive.set_sensitive(true);
    let expected = [(0x10, 12); 3];
    assert_eq!(lengths("name", &sensitive, &mut encoder), expected);
    for (length, first) in [(1024 - 36, 0xbe), (1024 - 35, 0x00)] {
        let large = HeaderValue::try_from("v".repeat(length)).unwrap();
        assert_eq!(lengths("name", &large, &mut encoder)[2].0, first);
    }
}

#[test]
fn unique_fields_evict_no_repeated_ones() {
    let mut encoder = Encoder::new();
    let repeated = [Field::Header(
        HeaderName::from_static("name"),
        HeaderValue::from_static("value"),
    )];
    for unique in 0..10_000 {
        let mut block = Vec::new();
        encode(&mut encoder, &repeated, &mut block);
        assert!(unique < 2 || block == [0xbe]);
        let value = HeaderValue::from(unique);
        encoder.header(&HeaderName::from_static("unique"), &value, &mut block);
    }
}

#[test]
fn fields_with_equal_hashes_are_distinguished() {
    let name = HeaderName::from_static("name");
    let mut values = HashMap::new();
    let (first, second) = (0_u64..)
        .find_map(|value| {
            let hash = hash(hash(0, b"name"), value.to_string().as_bytes());
            values
                .insert(hash as u32, value)
                .map(|other| (other, value))
        })
        .unwrap();
    let fields = [first, second].map(|value| Field::Header(name.clone(), value.into()));
    let (mut encoder, mut decoder) = (Encoder::new(), Decoder::new(4096));
    for _ in 0..4 {
        let mut block = Vec::new();
        encode(&mut encoder, &fields, &mut block);
        let expected = fields.each_ref().map(text).join(" | ");
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
