//! Settings that are one of a few words, in flags and in XML.

/// Gives an enum its words: `Display`, `FromStr`, and the error of the latter, whose message follows
/// the word that was found.
macro_rules! words {
    ($choice:ident { $($variant:ident = $word:literal),+ }, $error:ident = $message:literal) => {
        impl $choice {
            #[cfg(test)]
            const ALL: &[Self] = &[$(Self::$variant),+];
        }

        impl std::fmt::Display for $choice {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(match self {
                    $(Self::$variant => $word),+
                })
            }
        }

        /// A word that is none of those.
        #[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
        #[error("'{0}' {text}", text = $message)]
        pub struct $error(String);

        impl std::str::FromStr for $choice {
            type Err = $error;

            fn from_str(text: &str) -> Result<Self, $error> {
                match text {
                    $($word => Ok(Self::$variant),)+
                    _ => Err($error(text.to_owned())),
                }
            }
        }

        #[cfg(test)]
        #[test]
        fn words_are_understood_and_others_told_apart() {
            for choice in $choice::ALL {
                assert_eq!(choice.to_string().parse(), Ok(*choice));
            }
            let error = "maybe".parse::<$choice>().expect_err("no such word");
            assert!(error.to_string().contains("'maybe'"), "{error}");
        }
    };
}

pub(crate) use words;
