//! Tests of the decoder with the examples of RFC 7541, appendix C, with invalid and random blocks,
//! and with the blocks of the encoder.

use std::collections::HashMap;

use fastrand::Rng;

use super::*;

const REQUESTS: [&str; 3] = [
    ":method: GET | :scheme: http | :path: / | :authority: www.example.com",
    ":method: GET | :scheme: http | :path: / | :authority: www.example.com | \
     cache-control: no-cache",
    ":method: GET | :scheme: https | :path: /index.html | :authority: www.example.com | \
     custom-key: custom-value",
];
const REQUEST_TABLES: [&str; 3] = [
    ":authority: www.example.com (57)",
    "cache-control: no-cache (53) | :authority: www.example.com (57)",
    "custom-key: custom-value (54) | cache-control: no-cache (53) | \
     :authority: www.example.com (57)",
];
const RESPONSES: [&str; 3] = [
    ":status: 302 | cache-control: private | date: Mon, 21 Oct 2013 20:13:21 GMT | \
     location: https://www.example.com",
    ":status: 307 | cache-control: private | date: Mon, 21 Oct 2013 20:13:21 GMT | \
     location: https://www.example.com",
    ":status: 200 | cache-control: private | date: Mon, 21 Oct 2013 20:13:22 GMT | \
     location: https://www.example.com | content-encoding: gzip | \
     set-cookie: foo=ASDJKHQKBZXOQWEOPIUAXQWEOIU; max-age=3600; version=1",
];
const RESPONSE_TABLES: [&str; 3] = [
    "location: https://www.example.com (63) | date: Mon, 21 Oct 2013 20:13:21 GMT (65) | \
     cache-control: private (52) | :status: 302 (42)",
    ":status: 307 (42) | location: https://www.example.com (63) | \
     date: Mon, 21 Oct 2013 20:13:21 GMT (65) | cache-control: private (52)",
    "set-cookie: foo=ASDJKHQKBZXOQWEOPIUAXQWEOIU; max-age=3600; version=1 (98) | \
     content-encoding: gzip (52) | date: Mon, 21 Oct 2013 20:13:22 GMT (65)",
];

#[test]
fn decodes_each_representation() {
    // C.2.1 to C.2.4
    let indexed = "400a637573746f6d2d6b65790d637573746f6d2d686561646572";
    let sensitive = "100870617373776f726406736563726574";
    for (block, field, entries) in [
        (
            indexed,
            "custom-key: custom-header",
            "custom-key: custom-header (55)",
        ),
        ("040c2f73616d706c652f70617468", ":path: /sample/path", ""),
        (sensitive, "password: secret [sensitive]", ""),
        ("82", ":method: GET", ""),
    ] {
        let mut decoder = Decoder::new(4096);
        assert_eq!(decode(&mut decoder, &hex(block)).unwrap(), field);
        assert_eq!(table(&mut decoder), entries);
    }
}

#[test]
fn decodes_requests() {
    // C.3
    let blocks = [
        "828684410f7777772e6578616d706c652e636f6d",
        "828684be58086e6f2d6361636865",
        "828785bf400a637573746f6d2d6b65790c637573746f6d2d76616c7565",
    ];
    assert_sections(4096, blocks, REQUESTS, REQUEST_TABLES);
}

#[test]
fn decodes_requests_with_huffman_coding() {
    // C.4
    let blocks = [
        "828684418cf1e3c2e5f23a6ba0ab90f4ff",
        "828684be5886a8eb10649cbf",
        "828785bf408825a849e95ba97d7f8925a849e95bb8e8b4bf",
    ];
    assert_sections(4096, blocks, REQUESTS, REQUEST_TABLES);
}

#[test]
fn decodes_responses_with_evictions() {
    // C.5
    let blocks = [
        "4803333032580770726976617465611d4d6f6e2c203231204f637420323031332032303a31333a323120474d54\
         6e1768747470733a2f2f7777772e6578616d706c652e636f6d",
        "4803333037c1c0bf",
        "88c1611d4d6f6e2c203231204f637420323031332032303a31333a323220474d54c05a04677a69707738666f6f\
         3d4153444a4b48514b425a584f5157454f50495541585157454f49553b206d61782d6167653d333630303b2076\
         657273696f6e3d31",
    ];
    assert_sections(256, blocks, RESPONSES, RESPONSE_TABLES);
}

#[test]
fn decodes_responses_with_evictions_and_huffman_coding() {
    // C.6
    let blocks = [
        "488264025885aec3771a4b6196d07abe941054d444a8200595040b8166e082a62d1bff6e919d29ad171863c78f\
         0b97c8e9ae82ae43d3",
        "4883640effc1c0bf",
        "88c16196d07abe941054d444a8200595040b8166e084a62d1bffc05a839bd9ab77ad94e7821dd7f2e6c7b335df\
         dfcd5b3960d5af27087f3672c1ab270fb5291f9587316065c003ed4ee5b1063d5007",
    ];
    assert_sections(256, blocks, RESPONSES, RESPONSE_TABLES);
}

fn assert_sections(
    max_table_size: usize,
    blocks: [&str; 3],
    sections: [&str; 3],
    tables: [&str; 3],
) {
    let mut decoder = Decoder::new(max_table_size);
    for ((block, section), entries) in blocks.into_iter().zip(sections).zip(tables) {
        let fields = decode(&mut decoder, &hex(block)).unwrap();
        assert_eq!(fields, section);
        assert_eq!(table(&mut decoder), entries);
    }
}

#[test]
fn indexes_outside_of_the_tables_fail() {
    for block in ["80", "be", "7e00", "0f2f00", "ffffff7f", "4001610162bf"] {
        assert_fails(block, "index outside of the tables");
    }
}

#[test]
fn integers_above_the_limit_fail() {
    // 2^28, and the next number
    assert_fails("ff81ffff7f", "index outside of the tables");
    assert_fails("ff82ffff7f", "integer above the limit");
    // five and six further bytes
    assert_fails("ff8080808000", "index outside of the tables");
    assert_fails("ff808080808000", "integer above the limit");
    assert_fails("ffffffffffffffffffff7f", "integer above the limit");
}

#[test]
fn truncated_blocks_fail() {
    let complete = hex("3fe11f400a637573746f6d2d6b65790d637573746f6d2d686561646572");
    assert!(decode(&mut Decoder::new(4096), &complete).is_ok());
    for length in (1..complete.len()).filter(|length| *length != 3) {
        let result = decode(&mut Decoder::new(4096), &complete[..length]);
        let expected = Err(DecodeError("field block ends within a field"));
        assert_eq!(result, expected, "{length} bytes");
    }
    assert_fails("0085f1e3", "field block ends within a field");
}

#[test]
fn invalid_huffman_codes_fail() {
    let padding = "invalid padding of a Huffman-coded string";
    let eos = "EOS in a Huffman-coded string";
    // The code of "0" is 00000. Valid padding is 111.
    for (code, error) in [
        ("8107", None),
        ("80", None),
        ("8207ff", Some(padding)),
        ("8100", Some(padding)),
        ("8106", Some(padding)),
        ("81ff", Some(padding)),
        ("8507ffffffff", Some(eos)),
        ("84ffffffff", Some(eos)),
    ] {
        let result = decode(&mut Decoder::new(4096), &hex(&format!("00{code}0131")));
        assert_eq!(result.err(), error.map(DecodeError), "{code}");
    }
}

#[test]
fn huffman_codes_of_all_bytes_are_decoded() {
    let codes = huffman_codes();
    let known = [0, 10, 48, 122, 255, 256].map(|symbol| codes[symbol]);
    assert_eq!(
        known,
        [0x1ff8, 0x3fff_fffc, 0, 0x7b, 0x3ff_ffee, 0x3fff_ffff]
    );
    let mut scratch = Vec::new();
    for (first, second) in (0..=255).flat_map(|first| (0..=255).map(move |second| (first, second)))
    {
        let text = [first, b'a', second, second];
        let decoded = huffman::decode(&huffman_encode(&text, &codes), &mut scratch);
        assert_eq!(decoded, Ok(&text[..]));
    }
}

#[test]
fn size_updates_empty_the_table() {
    let mut decoder = Decoder::new(4096);
    let (insert, entry) = (literal(0x40, b"name", b"value"), "name: value (41)");
    for (block, expected) in [
        (&insert, entry),
        (&hex("3f0a"), entry), // 41 bytes
        (&hex("3f09"), ""),    // 40 bytes
        (&insert, ""),
        (&[hex("203fe11f"), insert.clone()].concat(), entry), // 0 and 4096 bytes
    ] {
        decode(&mut decoder, block).unwrap();
        assert_eq!(table(&mut decoder), expected);
    }
}

#[test]
fn invalid_size_updates_fail() {
    assert_fails("3fe21f", "size update above the limit");
    assert_fails("203fe21f", "size update above the limit");
    assert_fails("8220", "size update after a field, or a third one");
    assert_fails("202020", "size update after a field, or a third one");
    let mut decoder = Decoder::new(65536);
    assert_eq!(decode(&mut decoder, &hex("3fe1ff03")), Ok(String::new()));
}

#[test]
fn table_begins_with_at_most_4096_bytes() {
    let mut decoder = Decoder::new(65536);
    let insert = literal(0x40, b"name", &[b'v'; 100]);
    decode(&mut decoder, &insert.repeat(50)).unwrap();
    assert_eq!(count(&table(&mut decoder)), 4096 / 136);
}

#[test]
fn entry_above_the_capacity_empties_the_table() {
    let mut decoder = Decoder::new(100);
    decode(&mut decoder, &literal(0x40, b"name", b"value")).unwrap();
    decode(&mut decoder, &literal(0x40, b"name", &[b'v'; 64])).unwrap();
    assert_eq!(count(&table(&mut decoder)), 1, "100 bytes");
    decode(&mut decoder, &literal(0x40, b"name", &[b'v'; 65])).unwrap();
    assert_eq!(table(&mut decoder), "", "101 bytes");
}

#[test]
fn inserted_field_can_evict_the_entry_of_its_name() {
    let mut decoder = Decoder::new(64);
    for name in ["custom", ":unknown", ":path"] {
        let block = [literal(0x40, name.as_bytes(), b"/1"), hex("7e032f3232")];
        let fields = decode(&mut decoder, &block.concat()).unwrap();
        let second = fields.split(" | ").nth(1).unwrap();
        let expected = format!("{second} ({})", name.len() + 35);
        assert_eq!(table(&mut decoder), expected);
    }
}

#[test]
fn malformed_fields_are_reported() {
    let long_name = format!("{}=value", "N".repeat(100));
    for (reason, fields) in [
        (
            "invalid field name",
            "=value|Name=value|na me=value|näme=value|na:me=value",
        ),
        ("invalid field name", &long_name),
        ("quote in a field name", "na\"me=value"),
        ("unknown pseudo-field", ":name=value|:=value|:Path=/"),
        (
            "space around a field value",
            "name= value|name=value\t|name= ",
        ),
        (
            "invalid byte in a field value",
            "name=v\rv|name=v\nv|name=v\0v|name=\x7f",
        ),
        ("invalid :method", ":method=|:method=GET |:method=G T"),
        ("invalid :scheme", ":scheme=|:scheme=http:|:scheme=ht tp"),
        (
            "invalid :authority",
            ":authority=|:authority=a/b|:authority=a b",
        ),
        (
            "invalid :path",
            ":path=|:path=a|:path=?a|:path=/#a|:path=/a b",
        ),
        ("invalid :protocol", ":protocol=|:protocol=a b|:protocol=ä"),
        (
            "invalid :status",
            ":status=|:status=20|:status=2000|:status=099|:status=2x0",
        ),
    ] {
        for field in fields.split('|') {
            let (name, value) = field.split_once('=').unwrap();
            let (name, value) = (name.as_bytes(), value.as_bytes());
            let block = [
                literal(0x40, name, value),
                literal(0, name, value),
                hex("be"),
            ];
            let fields = decode(&mut Decoder::new(4096), &block.concat()).unwrap();
            let expected = [&*format!("malformed: {reason}"); 3].join(" | ");
            assert_eq!(fields, expected, "{field:?}");
        }
    }
}

#[test]
fn valid_fields_are_accepted() {
    for field in [
        "name: ",
        "name: a \t b ä",
        &format!("{}: value", "n".repeat(100)),
        ":method: PURGE",
        ":scheme: coap",
        ":authority: [::1]:80",
        ":path: *",
        ":path: /a?b?c",
        ":protocol: websocket",
        ":status: 599",
    ] {
        let (name, value) = field.split_once(": ").unwrap();
        let block = literal(0, name.as_bytes(), value.as_bytes());
        assert_eq!(decode(&mut Decoder::new(4096), &block).unwrap(), field);
    }
}

#[test]
fn static_entries_without_a_valid_value_are_malformed() {
    let fields = decode(&mut Decoder::new(4096), &hex("81bd")).unwrap();
    assert_eq!(fields, "malformed: invalid :authority | www-authenticate: ");
}

#[test]
fn name_of_a_malformed_entry_remains_known() {
    let mut decoder = Decoder::new(4096);
    let insert = [
        literal(0x40, b":status", b"none"),
        literal(0x40, b":UNKNOWN", b"1"),
    ];
    decode(&mut decoder, &insert.concat()).unwrap();
    let fields = decode(&mut decoder, &hex("7e033230307f0103323030")).unwrap();
    assert_eq!(fields, "malformed: unknown pseudo-field | :status: 200");
    let entries = table(&mut decoder);
    assert!(entries.starts_with(":status: 200 (42) | malformed: unknown pseudo-field (43) | "));
}

#[test]
fn unwanted_fields_are_skipped() {
    let block = [
        hex("82"),
        literal(0x00, b"name", b"value"),
        hex("0084ffffffff84ffffffff0084ffffffff"),
    ];
    // The name and value of the third field are not checked. The value of the last one is missing.
    let mut count = 0;
    let stop = |_: &Field, _| {
        count += 1;
        count < 2
    };
    let result = Decoder::new(4096).decode(&block.concat(), stop);
    assert_eq!(result, Err(DecodeError("field block ends within a field")));
    assert_eq!(count, 2);
    for (block, error) in [
        ("820f2f00", "index outside of the tables"),
        ("824084ffffffff00", "EOS in a Huffman-coded string"),
    ] {
        let result = Decoder::new(4096).decode(&hex(block), |_, _| false);
        assert_eq!(result, Err(DecodeError(error)));
    }
}

#[test]
fn table_stays_in_step_while_fields_are_unwanted() {
    let mut rng = Rng::with_seed(1);
    let (mut encoder, mut block) = (Encoder::new(), Vec::new());
    let (mut complete, mut stopped) = (Decoder::new(4096), Decoder::new(4096));
    for _ in 0..500 {
        block.clear();
        let fields = random_section(&mut rng);
        encode(&mut encoder, &fields, &mut block);
        decode(&mut complete, &block).unwrap();
        let mut wanted = rng.usize(0..=fields.len());
        let each = |_: &Field, _| {
            wanted = wanted.saturating_sub(1);
            wanted > 0
        };
        stopped.decode(&block, each).unwrap();
        assert_eq!(table(&mut stopped), table(&mut complete));
    }
}

#[test]
fn decoder_returns_the_fields_of_the_encoder() {
    let mut rng = Rng::with_seed(2);
    let (mut encoder, mut decoder) = (Encoder::new(), Decoder::new(4096));
    let (mut block, mut bytes, mut encoded_bytes) = (Vec::new(), 0, 0);
    for _ in 0..2000 {
        block.clear();
        while rng.u8(..) < 20 {
            let sizes = [0, 100, 500, 2000, 4095, 4096, 10_000];
            encoder.set_max_table_size(sizes[rng.usize(..sizes.len())]);
        }
        let fields = random_section(&mut rng);
        encode(&mut encoder, &fields, &mut block);
        let mut decoded = Vec::new();
        let each = |field: &Field, size| {
            bytes += size - 32;
            decoded.push(field.clone());
            true
        };
        decoder.decode(&block, each).unwrap();
        assert_eq!(decoded, fields);
        let texts = |fields: &[Field]| fields.iter().map(text).collect::<Vec<_>>();
        assert_eq!(texts(&decoded), texts(&fields));
        encoded_bytes += block.len();
    }
    assert!(encoded_bytes < bytes, "{encoded_bytes} of {bytes} bytes");
}

#[test]
fn random_blocks_never_exceed_the_table() {
    let mut rng = Rng::with_seed(3);
    let (mut encoder, mut decoder) = (Encoder::new(), Decoder::new(300));
    let mut valid = 0;
    for round in 0..100_000 {
        let mut block = Vec::new();
        if rng.bool() {
            encoder.set_max_table_size(300);
            encode(&mut encoder, &random_section(&mut rng), &mut block);
            for _ in 0..rng.usize(0..3) {
                let position = rng.usize(..block.len());
                block[position] = rng.u8(..);
            }
        } else {
            block.extend((0..rng.usize(0..40)).map(|_| rng.u8(..)));
        }
        let wanted = rng.usize(0..20);
        let mut count = 0;
        let each = |_: &Field, _| {
            count += 1;
            count < wanted
        };
        if decoder.decode(&block, each).is_ok() {
            valid += 1;
        }
        if round % 10 == 0 {
            let sizes = entries(&mut decoder).into_iter().map(|(_, size)| size);
            assert!(sizes.sum::<usize>() <= 300);
        }
        if rng.u8(..) == 0 {
            (encoder, decoder) = (Encoder::new(), Decoder::new(300));
        }
    }
    assert!(valid > 1000, "{valid} valid blocks");
}

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
            let hash = encoder::hash(encoder::hash(0, b"name"), value.to_string().as_bytes());
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

fn assert_fails(block: &str, error: &'static str) {
    let result = decode(&mut Decoder::new(4096), &hex(block));
    assert_eq!(result, Err(DecodeError(error)), "{block}");
}

/// The fields of a block.
fn decode(decoder: &mut Decoder, block: &[u8]) -> Result<String, DecodeError> {
    let mut fields = Vec::new();
    let each = |field: &Field, _| {
        fields.push(text(field));
        true
    };
    decoder.decode(block, each)?;
    Ok(fields.join(" | "))
}

/// The fields of the dynamic table and their sizes.
fn table(decoder: &mut Decoder) -> String {
    let entries = entries(decoder).into_iter();
    let texts = entries.map(|(field, size)| format!("{} ({size})", text(&field)));
    texts.collect::<Vec<_>>().join(" | ")
}

fn entries(decoder: &mut Decoder) -> Vec<(Field, usize)> {
    let mut entries = Vec::new();
    for position in 0..190 {
        let index = match position {
            0..65 => &[0xbe + position][..],
            _ => &[0xff, position - 65],
        };
        let each = |field: &Field, size| {
            entries.push((field.clone(), size));
            true
        };
        if decoder.decode(index, each).is_err() {
            break;
        }
    }
    entries
}

fn count(fields: &str) -> usize {
    fields.split(" | ").count()
}

fn text(field: &Field) -> String {
    match field {
        Field::Method(method) => format!(":method: {method}"),
        Field::Scheme(scheme) => format!(":scheme: {scheme}"),
        Field::Authority(authority) => format!(":authority: {authority}"),
        Field::Path(path) => format!(":path: {path}"),
        Field::Protocol(protocol) => format!(":protocol: {}", protocol.to_str().unwrap()),
        Field::Status(status) => format!(":status: {}", status.as_str()),
        Field::Header(name, value) => {
            let mark = if value.is_sensitive() {
                " [sensitive]"
            } else {
                ""
            };
            format!(
                "{name}: {}{mark}",
                String::from_utf8_lossy(value.as_bytes())
            )
        }
        Field::Malformed(reason) => format!("malformed: {reason}"),
    }
}

fn hex(text: &str) -> Vec<u8> {
    let digits = text.as_bytes().chunks(2);
    let parse = |pair| u8::from_str_radix(str::from_utf8(pair).unwrap(), 16).unwrap();
    digits.map(parse).collect()
}

/// A literal field with the first byte of a representation.
fn literal(first: u8, name: &[u8], value: &[u8]) -> Vec<u8> {
    let length = |text: &[u8]| vec![u8::try_from(text.len()).unwrap()];
    [&[first], &length(name)[..], name, &length(value), value].concat()
}

fn encode(encoder: &mut Encoder, fields: &[Field], block: &mut Vec<u8>) {
    encoder.begin(block);
    for field in fields {
        match field {
            Field::Method(method) => encoder.method(method, block),
            Field::Scheme(scheme) => encoder.scheme(scheme, block),
            Field::Authority(authority) => encoder.authority(authority.as_str(), block),
            Field::Path(path) => encoder.path(path.as_str(), block),
            Field::Protocol(protocol) => encoder.protocol(protocol.as_bytes(), block),
            Field::Status(status) => encoder.status(*status, block),
            Field::Header(name, value) => encoder.header(name, value, block),
            Field::Malformed(reason) => panic!("{reason}"),
        }
    }
}

/// Fields with few different names and values, and some unique ones.
fn random_section(rng: &mut Rng) -> Vec<Field> {
    (0..rng.usize(1..20)).map(|_| random_field(rng)).collect()
}

fn random_field(rng: &mut Rng) -> Field {
    let number = if rng.u8(..) < 30 {
        rng.u32(..)
    } else {
        rng.u32(..6)
    };
    match rng.u8(..20) {
        0 => Field::Method(["GET", "PUT", "PURGE"][rng.usize(..3)].parse().unwrap()),
        1 => Field::Scheme(["http", "https", "coap"][rng.usize(..3)].parse().unwrap()),
        2 => Field::Authority(format!("host-{number}:80").parse().unwrap()),
        3 => Field::Path(format!("/{number}?query").parse().unwrap()),
        4 => Field::Protocol(HeaderValue::from_static("websocket")),
        5 => Field::Status(StatusCode::from_u16(rng.u16(100..600)).unwrap()),
        6 => Field::Header(random_name(rng), HeaderValue::from_static("")),
        kind => {
            let text =
                format!("{number}-").repeat(rng.usize(1..4) * if kind == 7 { 100 } else { 1 });
            let mut value = HeaderValue::try_from(text).unwrap();
            value.set_sensitive(rng.u8(..) < 20);
            Field::Header(random_name(rng), value)
        }
    }
}

fn random_name(rng: &mut Rng) -> HeaderName {
    let names = [
        "accept",
        "accept-encoding",
        "cookie",
        "date",
        "x-name",
        "x-other-name",
        "x-request-id",
    ];
    HeaderName::from_static(names[rng.usize(..names.len())])
}

/// The codes of the symbols, computed from their lengths.
fn huffman_codes() -> Vec<u32> {
    let mut symbols: Vec<_> = (0..huffman::LENGTHS.len()).collect();
    symbols.sort_by_key(|symbol| huffman::LENGTHS[*symbol]);
    let mut codes = vec![0; symbols.len()];
    // The next code, aligned to the highest bit. The sum of all is 2^32: the code is complete.
    let mut next = 0_u64;
    for symbol in symbols {
        let unused = 32 - u32::from(huffman::LENGTHS[symbol]);
        codes[symbol] = (next >> unused) as u32;
        next += 1 << unused;
    }
    assert_eq!(next, 1 << 32);
    codes
}

fn huffman_encode(text: &[u8], codes: &[u32]) -> Vec<u8> {
    let bits = text.iter().flat_map(|byte| {
        let symbol = usize::from(*byte);
        let length = huffman::LENGTHS[symbol];
        (0..length)
            .rev()
            .map(move |bit| codes[symbol] >> bit & 1 == 1)
    });
    let bits: Vec<bool> = bits.collect();
    let byte = |bits: &[bool]| {
        (0..8).fold(0, |byte, bit| {
            byte << 1 | u8::from(*bits.get(bit).unwrap_or(&true))
        })
    };
    bits.chunks(8).map(byte).collect()
}
