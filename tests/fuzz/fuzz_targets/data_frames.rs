#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| outram_fuzz::data_frames(data));
