//! Random fields and random blocks: both sides keep the same table, within the limit.

use fastrand::Rng;

use super::*;

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
        let each = |_: &Field<'_>| {
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
        let each = |field: &Field<'_>| {
            bytes += field.size() - 32;
            decoded.push(text(field));
            true
        };
        decoder.decode(&block, each).unwrap();
        assert_eq!(decoded, fields.iter().map(Plain::text).collect::<Vec<_>>());
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
        let each = |_: &Field<'_>| {
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

/// Fields with few different names and values, and some unique ones.
fn random_section(rng: &mut Rng) -> Vec<Plain> {
    (0..rng.usize(1..20)).map(|_| random_field(rng)).collect()
}

fn random_field(rng: &mut Rng) -> Plain {
    let number = if rng.u8(..) < 30 {
        rng.u32(..)
    } else {
        rng.u32(..6)
    };
    match rng.u8(..20) {
        0 => plain(":method", ["GET", "PUT", "PURGE"][rng.usize(..3)]),
        1 => plain(":scheme", ["http", "https", "coap"][rng.usize(..3)]),
        2 => plain(":authority", format!("host-{number}:80")),
        3 => plain(":path", format!("/{number}?query")),
        4 => plain(":protocol", "websocket"),
        5 => plain(":status", rng.u16(100..600).to_string()),
        6 => plain(random_name(rng), ""),
        kind => {
            let text =
                format!("{number}-").repeat(rng.usize(1..4) * if kind == 7 { 100 } else { 1 });
            Plain {
                is_sensitive: rng.u8(..) < 20,
                ..plain(random_name(rng), text)
            }
        }
    }
}

fn random_name(rng: &mut Rng) -> &'static str {
    let names = [
        "accept",
        "accept-encoding",
        "cookie",
        "date",
        "x-name",
        "x-other-name",
        "x-request-id",
    ];
    names[rng.usize(..names.len())]
}
