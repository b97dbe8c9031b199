//! libFuzzer's way into [`diy_mesh_proxy_fuzz::session`]: `make fuzz TARGET=session`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| diy_mesh_proxy_fuzz::session(bytes));
