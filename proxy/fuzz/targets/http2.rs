//! libFuzzer's way into [`diy_mesh_proxy_fuzz::http2`]: `make fuzz TARGET=http2`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| diy_mesh_proxy_fuzz::http2(bytes));
