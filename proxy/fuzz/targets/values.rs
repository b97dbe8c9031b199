//! libFuzzer's way into [`diy_mesh_proxy_fuzz::values`]: `make fuzz TARGET=values`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| diy_mesh_proxy_fuzz::values(bytes));
