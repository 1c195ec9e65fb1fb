//! Finding NVIDIA's libraries where people have them, and opening them without a panic.
//!
//! The places are tried in the order of [`candidates`]; a version whose major number the driver supports comes before
//! a newer one wherever it is, because a cubin made by a newer NVRTC does not load on an older driver.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// Oldest major version of the libraries that is used.
const OLDEST: u32 = 12;

/// Folders to search before all others, separated like `PATH`.
pub const LIBRARY_PATH_VARIABLE: &str = "ROLLOUT_CUDA_LIBRARIES";

/// A library that this crate opens at run time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LibraryKind {
    /// Name between `lib` and `.so`.
    pub(crate) stem: &'static str,
    /// What to tell someone who has none.
    pub(crate) advice: &'static str,
    /// Prefix of files in the same folder that must be open before it is.
    pub(crate) companion: Option<&'static str>,
}

pub(crate) const NVRTC: LibraryKind = LibraryKind {
    stem: "nvrtc",
    advice: "install the CUDA toolkit, or `pip install nvidia-cuda-nvrtc` in the active Python environment, or \
             put its folder into ROLLOUT_CUDA_LIBRARIES",
    companion: Some("libnvrtc-builtins.so"),
};

pub(crate) const CUBLAS_LT: LibraryKind = LibraryKind {
    stem: "cublasLt",
    advice: "install the CUDA toolkit, or `pip install nvidia-cublas` in the active Python environment, or put \
             its folder into ROLLOUT_CUDA_LIBRARIES",
    companion: None,
};

/// Where to look, made explicit so that the search can be tested.
pub(crate) struct Surroundings<'a> {
    /// Reads an environment variable.
    pub(crate) var: &'a dyn Fn(&str) -> Option<OsString>,
    /// Root of the file system.
    pub(crate) root: PathBuf,
}

impl Surroundings<'static> {
    /// The process's own.
    pub(crate) fn of_process() -> Self {
        Self {
            var: &|name| std::env::var_os(name),
            root: PathBuf::from("/"),
        }
    }
}

/// The folders that the user named for this purpose; searched before the loader's path.
fn named_folders(at: &Surroundings<'_>) -> Vec<PathBuf> {
    let mut found = Vec::new();
    if let Some(list) = (at.var)(LIBRARY_PATH_VARIABLE) {
        for folder in std::env::split_paths(&list).filter(|folder| !folder.as_os_str().is_empty()) {
            found.push(folder.clone());
            found.extend(wheel_folders(&folder));
        }
    }
    found
}

/// The folders where a library usually is, most specific first, without repeats; searched after the loader's path.
/// Not all of them exist.
fn usual_folders(at: &Surroundings<'_>) -> Vec<PathBuf> {
    let var = |name: &str| (at.var)(name).filter(|value| !value.is_empty());
    let mut found = Vec::new();
    for name in ["CUDA_HOME", "CUDA_PATH", "CUDA_ROOT"] {
        found.extend(
            var(name)
                .into_iter()
                .flat_map(|home| toolkit_folders(Path::new(&home))),
        );
    }
    found.extend(toolkit_folders(&at.root.join("usr/local/cuda")));
    found.extend(toolkit_folders(&at.root.join("opt/cuda")));
    for (_, toolkit) in children(&at.root.join("usr/local"), "cuda-").into_iter().rev() {
        found.extend(toolkit_folders(&toolkit));
    }
    for name in ["VIRTUAL_ENV", "CONDA_PREFIX"] {
        if let Some(prefix) = var(name) {
            found.extend(python_folders(Path::new(&prefix)));
            found.extend(toolkit_folders(Path::new(&prefix)));
        }
    }
    for program_folder in var("PATH").iter().flat_map(std::env::split_paths) {
        if program_folder.join("python3").exists()
            && let Some(prefix) = program_folder.parent()
        {
            found.extend(python_folders(prefix));
        }
    }
    if let Some(home) = var("HOME") {
        found.extend(python_folders(&Path::new(&home).join(".local")));
    }
    // Where scripts/setup-nvrtc.sh puts the wheel.
    let data = var("XDG_DATA_HOME")
        .map(PathBuf::from)
        .or_else(|| var("HOME").map(|home| Path::new(&home).join(".local/share")));
    found.extend(
        data.iter()
            .flat_map(|data| wheel_folders(&data.join("rollout/nvrtc"))),
    );
    found.extend(wheel_folders(&at.root.join("opt/nvrtc")));

    let mut unique: Vec<PathBuf> = Vec::with_capacity(found.len());
    for folder in found {
        if !unique.contains(&folder) {
            unique.push(folder);
        }
    }
    unique
}

/// Library folders of a toolkit installed at `home`.
fn toolkit_folders(home: &Path) -> Vec<PathBuf> {
    [
        "lib64",
        "lib",
        "targets/x86_64-linux/lib",
        "targets/sbsa-linux/lib",
        "targets/aarch64-linux/lib",
    ]
    .into_iter()
    .map(|folder| home.join(folder))
    .collect()
}

/// Library folders of NVIDIA wheels in the Python environment at `prefix`.
fn python_folders(prefix: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for lib in ["lib", "lib64"] {
        for (_, python) in children(&prefix.join(lib), "python3").into_iter().rev() {
            for packages in ["site-packages", "dist-packages"] {
                found.extend(wheel_folders(&python.join(packages)));
            }
        }
    }
    found
}

/// Library folders of NVIDIA wheels unpacked in `packages`: `nvidia/cu13/lib`, `nvidia/cuda_nvrtc/lib`, …
fn wheel_folders(packages: &Path) -> Vec<PathBuf> {
    children(&packages.join("nvidia"), "")
        .into_iter()
        .rev()
        .map(|(_, wheel)| wheel.join("lib"))
        .collect()
}

/// Entries of `folder` whose name starts with `prefix`, sorted by name.
fn children(folder: &Path, prefix: &str) -> Vec<(String, PathBuf)> {
    let mut found: Vec<_> = std::fs::read_dir(folder)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| Some((entry.file_name().into_string().ok()?, entry.path())))
        .filter(|(name, _)| name.starts_with(prefix))
        .collect();
    found.sort();
    found
}

/// A file that may be the library, with the major version its name tells.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Candidate {
    /// A full path, or a bare name for the loader to resolve.
    pub(crate) path: PathBuf,
    /// Major version, if the name has one.
    pub(crate) major: Option<u32>,
}

/// The major version in a file name such as `libnvrtc.so.13` or `libnvrtc.so.12.4.127`. `Err` if the name is not
/// that of the library `stem`.
fn major_of(name: &str, stem: &str) -> Result<Option<u32>, ()> {
    let rest = name
        .strip_prefix("lib")
        .and_then(|n| n.strip_prefix(stem))
        .and_then(|n| n.strip_prefix(".so"));
    match rest {
        None => Err(()),
        Some("") => Ok(None),
        Some(version) => {
            let version = version.strip_prefix('.').ok_or(())?;
            let mut parts = version.split('.');
            let major = parts.next().and_then(|part| part.parse().ok()).ok_or(())?;
            if parts.all(|part| part.parse::<u32>().is_ok()) {
                Ok(Some(major))
            } else {
                Err(())
            }
        }
    }
}

/// Files in `folder` that may be the library, newest first.
fn candidates_in(folder: &Path, kind: LibraryKind) -> Vec<Candidate> {
    let mut found: Vec<Candidate> = children(folder, "lib")
        .into_iter()
        .filter_map(|(name, path)| {
            Some(Candidate {
                path,
                major: major_of(&name, kind.stem).ok()?,
            })
        })
        .map(|mut candidate| {
            if candidate.major.is_none()
                && let Ok(target) = std::fs::canonicalize(&candidate.path)
                && let Some(name) = target.file_name().and_then(OsStr::to_str)
            {
                candidate.major = major_of(name, kind.stem).ok().flatten();
            }
            candidate
        })
        .collect();
    found.sort_by_key(|candidate| std::cmp::Reverse(candidate.major));
    found
}

/// Everything that may be the library, best first: the folders the user named, the loader's path, the usual folders;
/// of these the versions that a driver of major version `driver` cannot serve last.
pub(crate) fn candidates(kind: LibraryKind, driver: Option<u32>, at: &Surroundings<'_>) -> Vec<Candidate> {
    let on_loader_path = |major: u32| Candidate {
        path: format!("lib{}.so.{major}", kind.stem).into(),
        major: Some(major),
    };
    let newest_tried = 19;
    let newest_served = driver.unwrap_or(newest_tried).clamp(OLDEST, newest_tried);
    let mut found = Vec::new();
    for folder in named_folders(at) {
        found.extend(candidates_in(&folder, kind));
    }
    found.extend((OLDEST..=newest_served).rev().map(on_loader_path));
    for folder in usual_folders(at) {
        found.extend(candidates_in(&folder, kind));
    }
    found.push(Candidate {
        path: format!("lib{}.so", kind.stem).into(),
        major: None,
    });
    found.extend((newest_served + 1..=newest_tried).map(on_loader_path));
    if let Some(driver) = driver {
        // Stable: keeps the order within both groups.
        found.sort_by_key(|candidate| candidate.major.is_some_and(|major| major > driver));
    }
    found.retain(|candidate| candidate.major.is_none_or(|major| major >= OLDEST));
    found
}

/// An open library. It stays open until the process ends: NVIDIA's libraries do not survive being unloaded.
pub(crate) struct OpenLibrary {
    library: libloading::Library,
    path: PathBuf,
}

impl OpenLibrary {
    /// Opens the first candidate that the loader accepts.
    ///
    /// # Errors
    /// [`Error::MissingLibrary`] with everything that was tried.
    pub(crate) fn find(kind: LibraryKind, driver: Option<u32>) -> Result<Self> {
        let at = Surroundings::of_process();
        let mut broken = Vec::new();
        for candidate in candidates(kind, driver, &at) {
            if let Some(folder) = candidate
                .path
                .parent()
                .filter(|folder| !folder.as_os_str().is_empty())
                && let Some(prefix) = kind.companion
            {
                open_companions(folder, prefix);
            }
            match open(&candidate.path) {
                Ok(library) => {
                    return Ok(Self {
                        library,
                        path: candidate.path,
                    });
                }
                // A bare name that the loader does not know is no news; a file that is there but does not load is.
                Err(error) if candidate.path.is_absolute() => {
                    broken.push(format!("{} ({error})", candidate.path.display()));
                }
                Err(_) => {}
            }
        }
        let mut searched = vec!["the loader's path".to_string()];
        searched.extend(
            named_folders(&at)
                .into_iter()
                .chain(usual_folders(&at))
                .filter(|f| f.is_dir())
                .map(|f| f.display().to_string()),
        );
        searched.extend(broken);
        Err(Error::MissingLibrary {
            name: format!("lib{}.so", kind.stem),
            searched,
            advice: kind.advice.to_string(),
        })
    }

    /// Opens exactly this file, its companions first.
    ///
    /// # Errors
    /// [`Error::UnusableLibrary`] with the loader's message.
    pub(crate) fn open(kind: LibraryKind, path: &Path) -> Result<Self> {
        if let (Some(folder), Some(prefix)) = (path.parent(), kind.companion) {
            open_companions(folder, prefix);
        }
        let library = open(path).map_err(|error| Error::UnusableLibrary {
            path: path.display().to_string(),
            reason: error.to_string(),
        })?;
        Ok(Self {
            library,
            path: path.to_path_buf(),
        })
    }

    /// The path or name it was opened by.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// A function of the library.
    ///
    /// # Errors
    /// [`Error::UnusableLibrary`] if it has no such function.
    ///
    /// # Safety
    /// `F` must be the function's type, as an `unsafe extern "C" fn` pointer.
    pub(crate) unsafe fn function<F: Copy>(&self, name: &str) -> Result<F> {
        // SAFETY: the caller vouches for the type; the library is never unloaded, since its owners live in statics
        // or in handles that keep it.
        match unsafe { self.library.get::<F>(name.as_bytes()) } {
            Ok(function) => Ok(*function),
            Err(error) => Err(Error::UnusableLibrary {
                path: self.path.display().to_string(),
                reason: error.to_string(),
            }),
        }
    }
}

/// Opens every file of `folder` whose name starts with `prefix` followed by a version, so that a library that asks
/// the loader for it by name finds it already there.
fn open_companions(folder: &Path, prefix: &str) {
    for (name, path) in children(folder, prefix) {
        let version = name.trim_start_matches(prefix);
        if version.chars().all(|c| c == '.' || c.is_ascii_digit())
            && let Ok(library) = open(&path)
        {
            // Must stay open as long as the library that needs it, which is until the process ends.
            std::mem::forget(library);
        }
    }
}

/// `dlopen` with global symbol visibility.
pub(crate) fn open(path: &Path) -> Result<libloading::Library, libloading::Error> {
    #[cfg(unix)]
    {
        use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
        // SAFETY: runs the initialisers of a library of NVIDIA's, named so and found in a folder meant for it.
        unsafe { Library::open(Some(path), RTLD_NOW | RTLD_GLOBAL) }.map(Into::into)
    }
    #[cfg(not(unix))]
    {
        // SAFETY: as above.
        unsafe { libloading::Library::new(path) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    struct Machine {
        root: tempfile::TempDir,
        vars: HashMap<String, OsString>,
    }

    impl Machine {
        fn new() -> Self {
            Self {
                root: tempfile::tempdir().unwrap(),
                vars: HashMap::new(),
            }
        }

        fn path(&self, relative: &str) -> PathBuf {
            self.root.path().join(relative)
        }

        fn file(&self, relative: &str) -> PathBuf {
            let path = self.path(relative);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(&path, "").unwrap();
            path
        }

        fn set(&mut self, name: &str, relative: &str) {
            let value = self.path(relative).into_os_string();
            self.vars.insert(name.to_string(), value);
        }

        fn candidates(&self, kind: LibraryKind, driver: Option<u32>) -> Vec<PathBuf> {
            let var = |name: &str| self.vars.get(name).cloned();
            let at = Surroundings {
                var: &var,
                root: self.root.path().to_path_buf(),
            };
            candidates(kind, driver, &at)
                .into_iter()
                .map(|c| c.path)
                .collect()
        }

        fn files(&self, kind: LibraryKind, driver: Option<u32>) -> Vec<PathBuf> {
            self.candidates(kind, driver)
                .into_iter()
                .filter(|path| path.is_absolute())
                .collect()
        }
    }

    #[test]
    fn libraries_are_found_in_every_usual_place_in_order() {
        let mut machine = Machine::new();
        let mut expected = vec![machine.file("mine/libnvrtc.so.13")];
        machine.set(LIBRARY_PATH_VARIABLE, "mine");
        expected.push(machine.file("home/lib64/libnvrtc.so.13"));
        machine.set("CUDA_HOME", "home");
        expected.push(machine.file("path/targets/x86_64-linux/lib/libnvrtc.so.12"));
        machine.set("CUDA_PATH", "path");
        expected.push(machine.file("usr/local/cuda/lib64/libnvrtc.so.12.4.127"));
        expected.push(machine.file("venv/lib/python3.12/site-packages/nvidia/cuda_nvrtc/lib/libnvrtc.so.12"));
        machine.set("VIRTUAL_ENV", "venv");
        expected.push(machine.file("conda/lib/python3.11/site-packages/nvidia/cu13/lib/libnvrtc.so.13"));
        expected.push(machine.file("conda/lib/libnvrtc.so.13"));
        machine.set("CONDA_PREFIX", "conda");
        machine.file("usr2/bin/python3");
        expected.push(machine.file("usr2/lib/python3.10/dist-packages/nvidia/cu13/lib/libnvrtc.so.13"));
        machine.set("PATH", "usr2/bin");
        expected.push(
            machine.file("me/.local/lib/python3.12/site-packages/nvidia/cuda_nvrtc/lib/libnvrtc.so.12"),
        );
        expected.push(machine.file("me/.local/share/rollout/nvrtc/nvidia/cu13/lib/libnvrtc.so.13"));
        machine.set("HOME", "me");
        expected.push(machine.file("opt/nvrtc/nvidia/cu13/lib/libnvrtc.so.13"));
        assert_eq!(machine.files(NVRTC, None), expected);
    }

    #[test]
    fn cublas_is_found_in_its_own_wheel_and_nothing_else_is_taken_for_it() {
        let mut machine = Machine::new();
        let site = "venv/lib/python3.12/site-packages/nvidia/";
        machine.file(&format!("{site}cublas/lib/libcublas.so.12"));
        machine.file(&format!("{site}cublas/lib/libcublasLt_static.a"));
        machine.file(&format!("{site}cublas/lib/libcublasLt.so.12.old"));
        let expected = machine.file(&format!("{site}cublas/lib/libcublasLt.so.12"));
        machine.set("VIRTUAL_ENV", "venv");
        assert_eq!(machine.files(CUBLAS_LT, None), [expected]);
    }

    #[test]
    fn a_version_the_driver_cannot_serve_comes_last_wherever_it_is() {
        let mut machine = Machine::new();
        let newer = machine.file("home/lib64/libnvrtc.so.13");
        machine.set("CUDA_HOME", "home");
        let fitting = machine.file("usr/local/cuda/lib64/libnvrtc.so.12");
        assert_eq!(machine.files(NVRTC, Some(12)), [fitting.clone(), newer.clone()]);
        assert_eq!(machine.files(NVRTC, Some(13)), [newer, fitting]);
    }

    #[test]
    fn the_loaders_path_comes_first_with_the_drivers_own_version_in_front() {
        let machine = Machine::new();
        let names = machine.candidates(NVRTC, Some(13));
        assert_eq!(names[0], Path::new("libnvrtc.so.13"));
        assert_eq!(names[1], Path::new("libnvrtc.so.12"));
        assert_eq!(names[2], Path::new("libnvrtc.so"));
        assert_eq!(
            names[3],
            Path::new("libnvrtc.so.14"),
            "a newer toolkit than any known is tried too"
        );
    }

    #[test]
    fn folders_the_user_names_come_before_the_loaders_path_and_too_old_versions_nowhere() {
        let mut machine = Machine::new();
        let mine = machine.file("mine/nvidia/cu13/lib/libnvrtc.so.13");
        machine.file("mine/libnvrtc.so.11.2");
        machine.set(LIBRARY_PATH_VARIABLE, "mine");
        let names = machine.candidates(NVRTC, Some(13));
        assert_eq!(names[..2], [mine, "libnvrtc.so.13".into()]);
        assert!(names.iter().all(|name| !name.ends_with("libnvrtc.so.11.2")));
    }

    #[test]
    fn an_unversioned_link_is_judged_by_its_target() {
        let machine = Machine::new();
        let target = machine.file("opt/cuda/lib64/libnvrtc.so.13.0.88");
        let link = target.with_file_name("libnvrtc.so");
        std::os::unix::fs::symlink(&target, &link).unwrap();
        machine.file("opt/nvrtc/nvidia/cuda_nvrtc/lib/libnvrtc.so.12");
        let files = machine.files(NVRTC, Some(12));
        assert!(files[0].ends_with("libnvrtc.so.12"), "{files:?}");
        assert!(files[1..].contains(&link));
    }

    #[test]
    fn the_advice_names_what_to_install_and_what_to_set() {
        for (kind, library, package) in [
            (NVRTC, "nvrtc", "nvidia-cuda-nvrtc"),
            (CUBLAS_LT, "cublasLt", "nvidia-cublas"),
        ] {
            assert_eq!(kind.stem, library);
            assert!(kind.advice.contains(package), "{}", kind.advice);
            assert!(kind.advice.contains(LIBRARY_PATH_VARIABLE), "{}", kind.advice);
        }
    }

    #[test]
    fn a_library_nobody_has_is_a_typed_error_with_advice() {
        let kind = LibraryKind {
            stem: "no-such-library",
            advice: "ask for it",
            companion: None,
        };
        let Err(Error::MissingLibrary {
            name,
            searched,
            advice,
        }) = OpenLibrary::find(kind, None)
        else {
            panic!("found a library that does not exist");
        };
        assert_eq!(
            (name.as_str(), advice.as_str()),
            ("libno-such-library.so", "ask for it")
        );
        assert_eq!(searched[0], "the loader's path");
    }

    #[test]
    fn a_file_that_is_no_library_is_a_typed_error() {
        let machine = Machine::new();
        let file = machine.file("libnvrtc.so.13");
        assert!(matches!(
            OpenLibrary::open(NVRTC, &file),
            Err(Error::UnusableLibrary { .. })
        ));
    }
}
