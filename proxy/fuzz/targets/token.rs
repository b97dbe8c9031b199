//! libFuzzer's way into [`diy_mesh_proxy_fuzz::token`]: `make fuzz TARGET=token`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| diy_mesh_proxy_fuzz::token(bytes));
