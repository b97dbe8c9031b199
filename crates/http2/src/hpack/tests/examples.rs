//! The examples of RFC 7541, appendix C.

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
