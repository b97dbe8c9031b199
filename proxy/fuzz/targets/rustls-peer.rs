//! libFuzzer's way into [`diy_mesh_proxy_fuzz::rustls_peer`]: `make fuzz TARGET=rustls_peer`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| diy_mesh_proxy_fuzz::rustls_peer(bytes));
