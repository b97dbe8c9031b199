//! libFuzzer's way into [`diy_mesh_proxy_fuzz::request`]: `make fuzz TARGET=request`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| diy_mesh_proxy_fuzz::request(bytes));
