//! libFuzzer's way into [`diy_mesh_proxy_fuzz::head`]: `make fuzz TARGET=head`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| diy_mesh_proxy_fuzz::head(bytes));
