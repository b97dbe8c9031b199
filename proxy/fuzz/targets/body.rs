//! libFuzzer's way into [`diy_mesh_proxy_fuzz::body`]: `make fuzz TARGET=body`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| diy_mesh_proxy_fuzz::body(bytes));
