//! Tests of the decoder with invalid and unusual blocks. The other files have the examples of RFC
//! 7541, the blocks of the encoder, and random blocks.

mod encoder;
mod examples;
mod properties;

use http::uri::PathAndQuery;
use http::{HeaderName, HeaderValue};

use super::*;

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
    let stop = |_: &Field<'_>| {
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
        let result = Decoder::new(4096).decode(&hex(block), |_| false);
        assert_eq!(result, Err(DecodeError(error)));
    }
}

fn assert_fails(block: &str, error: &'static str) {
    let result = decode(&mut Decoder::new(4096), &hex(block));
    assert_eq!(result, Err(DecodeError(error)), "{block}");
}

/// The fields of a block.
fn decode(decoder: &mut Decoder, block: &[u8]) -> Result<String, DecodeError> {
    let mut fields = Vec::new();
    let each = |field: &Field<'_>| {
        fields.push(text(field));
        true
    };
    decoder.decode(block, each)?;
    Ok(fields.join(" | "))
}

/// The fields of the dynamic table and their sizes.
fn table(decoder: &mut Decoder) -> String {
    let entries = entries(decoder).into_iter();
    let texts = entries.map(|(field, size)| format!("{field} ({size})"));
    texts.collect::<Vec<_>>().join(" | ")
}

/// The fields of the dynamic table as texts, and their sizes.
fn entries(decoder: &mut Decoder) -> Vec<(String, usize)> {
    let mut entries = Vec::new();
    for position in 0..190 {
        let index = match position {
            0..65 => &[0xbe + position][..],
            _ => &[0xff, position - 65],
        };
        let each = |field: &Field<'_>| {
            entries.push((text(field), field.size()));
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

fn text(field: &Field<'_>) -> String {
    let mark = if field.is_sensitive {
        " [sensitive]"
    } else {
        ""
    };
    match field.kind {
        Kind::Malformed(reason) => format!("malformed: {reason}"),
        _ => {
            let [name, value] = [field.name, field.value].map(String::from_utf8_lossy);
            format!("{name}: {value}{mark}")
        }
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

/// A field to encode.
#[derive(Clone)]
struct Plain {
    name: String,
    value: String,
    is_sensitive: bool,
}

fn plain(name: &str, value: impl Into<String>) -> Plain {
    Plain {
        name: name.to_owned(),
        value: value.into(),
        is_sensitive: false,
    }
}

impl Plain {
    fn text(&self) -> String {
        text(&Field {
            name: self.name.as_bytes(),
            value: self.value.as_bytes(),
            kind: Kind::Header,
            is_sensitive: self.is_sensitive,
        })
    }
}

fn encode(encoder: &mut Encoder, fields: &[Plain], block: &mut Vec<u8>) {
    encoder.begin(block);
    for field in fields {
        let (name, value) = (field.name.as_bytes(), field.value.as_bytes());
        encoder.field(name, value, field.is_sensitive, block);
    }
}

/// Names, paths and values are valid exactly if the crate `http` accepts them, but for quotes in
/// names, and for paths that do not begin with a slash or have a fragment.
#[test]
fn validity_is_as_in_the_crate_http() {
    for byte in 0..=u8::MAX {
        let name = [b'a', byte];
        let is_known = HeaderName::from_lowercase(&name).is_ok() && byte != b'"';
        assert_eq!(is_name(&name), is_known, "name {byte:#x}");
        let value = [b'a', byte, b'a'];
        let is_known = HeaderValue::from_bytes(&value).is_ok();
        assert_eq!(is_of_value(byte), is_known, "value {byte:#x}");
        for path in [&[b'/', byte][..], &[b'/', b'?', byte]] {
            let is_known = PathAndQuery::try_from(path).is_ok() && byte != b'#';
            assert_eq!(is_path(path), is_known, "path {path:?}");
        }
    }
    for path in ["/ä", "/?ä", "/a?b?c{\"}", "*", ""] {
        let is_known = PathAndQuery::try_from(path).is_ok() && !path.is_empty();
        assert_eq!(is_path(path.as_bytes()), is_known, "{path}");
    }
    let long = vec![b'n'; MAX_NAME + 1];
    assert!(is_name(&long[1..]) && HeaderName::from_lowercase(&long[1..]).is_ok());
    assert!(!is_name(&long) && HeaderName::from_lowercase(&long).is_err());
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
